"""What a lost rank costs a training run, and what copies of each step cost.

`python -m benchmarks.faults.lost_ranks [--size 30m]`: two worker processes of one thread each on this machine, under
four plans. Runs with a copy of each step in the other rank's memory and runs without take turns. Then one of the two
processes is killed within a step, and the time until the next new step has ended is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.models.random_llama import SHAPES, parameters
from benchmarks.report import markdown
from benchmarks.report.results import Page, write
from benchmarks.training.throughput import Work
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.train.open_training import TrainingRun, TrainingWork, open_training
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob
from tllm.training.report.events import RunLostRank, RunResumed, RunStepped

PLANS = ("pp=2", "tp=2", "dp=2,zero=1", "dp=2")
WARM = 2
"""Steps at the start of a run that warm up and are not counted."""


class Loss(NamedTuple):
    """Seconds from the kill until it was known, the run went on, and a new step had ended; steps done twice."""

    known: float
    resumed: float
    stepped: float
    again: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="30m")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (%(default)s)")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), metavar="PLAN")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        work = Work(args.size, args.length, args.batch, Path(root))
        raw = {plan: measured(work, plan, args) for plan in args.plans}
    write(page(args.size, raw), raw)


PURPOSE = """What a copy of each step in another rank's memory costs, and how fast a training run goes on when a rank is
killed. Two processes of one thread each on this machine; one of them is killed in the middle of a step."""
READING = """Medians over steps, and over rounds of the losses. `known`, `goes on` and `new step` are seconds from the
kill until the loss was reported, until all ranks were ready again, and until the next step that had not been done
before had ended; that time contains the whole of that step, and `again` steps that are done a second time."""
LIMITS = "- Two ranks on one machine: copies travel over loopback, and the ranks compete for two cores."


def page(size: str, raw: dict[str, dict[str, Any]]) -> Page:
    """The page of raw figures: seconds of steps `with` and `without` copies, and the `losses`, of each plan."""
    title = f"A lost rank, training a model of {parameters(size)}"
    return Page("faults", "lost-ranks", title, PURPOSE, table(raw), READING, LIMITS)


def measured(work: Work, plan: str, args: argparse.Namespace) -> dict[str, Any]:
    steps: dict[int, list[float]] = {0: [], 1: []}
    losses = []
    for number in range(args.rounds):
        for every in steps:
            steps[every] += asyncio.run(run(work, plan, args.steps, every, f"{plan}-{number}-{every}"))
        losses.append(asyncio.run(lost(work, plan, args.steps, f"{plan}-{number}-lost")))
    return {"without": steps[0], "with": steps[1], "losses": [one._asdict() for one in losses]}


def opened(work: Work, plan: str, steps: int, every: int, name: str) -> AbstractAsyncContextManager[TrainingRun]:
    """A run of so many steps, with a copy of each `every`-th one in the other rank's memory (0: no copies)."""
    job = Job(
        output_dir=str(work.root / name),
        train_files=(str(work.rows),),
        model_name_or_path=str(work.folder),
        max_steps=steps,
        seq_len=work.length,
        global_batch_size=work.batch,
        save_steps=10**6,
        mirror_steps=every,
        shuffle=False,
        packing=False,
    )
    config = read_config(work.folder)
    spec = spec_from_config(config)
    parsed = Plan.parse(plan, spec.num_layers)
    training = TrainingWork(ResolvedJob(job, {}), parsed, json.dumps(config))
    return open_training(training, ClusterOptions(threads=1), on_loss="replan")


async def run(work: Work, plan: str, steps: int, every: int, name: str) -> list[float]:
    """Seconds of each step from one record to the next."""
    ends = []
    async with opened(work, plan, steps + WARM + 1, every, name) as training:
        async for event in training.events():
            if isinstance(event, RunStepped):
                ends.append(time.monotonic())
            if len(ends) == steps + WARM:
                break
    return [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]


async def lost(work: Work, plan: str, steps: int, name: str) -> Loss:
    async with opened(work, plan, 10**6, 1, name) as training:
        ends: list[float] = []
        at = dict[str, float]()
        again = reached = 0
        async for event in training.events():
            now = time.monotonic()
            if isinstance(event, RunLostRank):
                at["known"] = now
            elif isinstance(event, RunResumed):
                at["resumed"], again = now, event.again
            elif isinstance(event, RunStepped) and not at:
                ends.append(now)
                if len(ends) == steps:
                    await asyncio.sleep(statistics.median(b - a for a, b in itertools.pairwise(ends)) / 2)
                    reached, at["kill"] = event.record.step, kill(training)
            elif isinstance(event, RunStepped):
                reached = max(reached, event.record.step) if "resumed" not in at else reached
                if "resumed" in at and event.record.step > reached:
                    return Loss(at["known"] - at["kill"], at["resumed"] - at["kill"], now - at["kill"], again)
    raise AssertionError("the run ended")


def kill(training: TrainingRun) -> float:
    os.kill(training.state.ranks[1].facts.pid, signal.SIGKILL)
    return time.monotonic()


def table(raw: dict[str, dict[str, Any]]) -> str:
    titles = ["plan", "step without copies, s", "with copies, s", "more", "known, s", "goes on, s", "new step, s"]
    rows = [[*titles, "again"]]
    for plan, one in raw.items():
        without, mirrored = statistics.median(one["without"]), statistics.median(one["with"])
        middle = {key: statistics.median(loss[key] for loss in one["losses"]) for key in one["losses"][0]}
        times = [f"{middle[key]:.2f}" for key in ("known", "resumed", "stepped")]
        more = f"{100 * (mirrored / without - 1):+.0f} %"
        rows.append([plan, f"{without:.3f}", f"{mirrored:.3f}", more, *times, f"{middle['again']:g}"])
    return markdown.table(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
