"""Where the seconds after the loss of a node go: `python -m benchmarks.faults.recovery_timeline [--rounds 3]`.

Worker processes of one thread each on this machine train or serve; one is killed by SIGKILL. The coordinator is this
process, and says when it missed the worker, assigned parts, and had their answers. Workers note how long what they do
took (`timed_fork_server`). All clocks are one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.faults.call_spans import FILE, Span, spans
from benchmarks.faults.lost_ranks import opened
from benchmarks.models.random_llama import model_folder
from benchmarks.processes.python_module import environment
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from benchmarks.training.throughput import Work
from tllm.cluster.state import Event, Planned
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.membership import Membership
from tllm.node.recovery.recovery import Patience, Recovery
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.sources import worker_forks
from tllm.spec.request import Request, SamplingParams
from tllm.training.report.events import RunResumed, RunStepped

LENGTH, BATCH = 32, 6
"""Tokens of a row and rows of a step: so few that a step is short beside what its state takes."""

STEPS = 4
"""Before the kill."""

TOKENS = 12
KILLED = 1
"""The rank that dies."""

MOMENTS = ("NodeLost", "NodeJoined", "Planned", "RankPrepared", "RankLoaded", "RankReady")
PIECES = ("end", "links", "load", "build", "learner", "find", "restore", "copy", "peak", "weights")


class Scene(NamedTuple):
    """What is lost: `plan` trains or serves a model of a `size`, and goes on with a worker that is started again, or
    with fewer."""

    work: str
    plan: str
    size: str
    again: bool

    def __str__(self) -> str:
        then = "started again" if self.again else "with fewer"
        return f"{self.work} {self.plan}, {self.size}, {then}"


SCENES = (
    Scene("train", "dp=3", "tiny", True),
    Scene("train", "dp=3", "60m", True),
    Scene("train", "dp=2,pp=2", "60m", True),
    Scene("train", "dp=3", "tiny", False),
    Scene("train", "dp=3", "60m", False),
    Scene("serve", "pp=3", "1m", False),
    Scene("serve", "pp=3", "0.3b", False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each scene (%(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="scenes that have these words")
    args = parser.parse_args()
    torch.set_num_threads(1)
    raw: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as root:
        notes = Path(root) / "spans"
        os.environ.update(environment(**{FILE: str(notes)}))
        command = worker_forks.worker_command
        worker_forks.worker_command = lambda threads, _, *words: command(
            threads, "benchmarks.faults.timed_fork_server", *words
        )
        for number, scene in itertools.product(range(args.rounds), SCENES):
            if all(word in str(scene) for word in args.only):
                notes.write_text("")
                play = trained if scene.work == "train" else served
                raw.setdefault(str(scene), []).append(asyncio.run(play(scene, Path(root), number, notes)))
    write(page(raw), raw)


class Watch:
    """What the coordinator records, each with its moment, and when the worker was killed."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str]] = []
        self.killed = 0.0
        self.left: set[int] = set()

    def kill(self, pids: Sequence[int]) -> None:
        self.left = set(pids) - {pids[KILLED]}
        os.kill(pids[KILLED], signal.SIGKILL)
        self.killed = time.monotonic()

    def row(self, notes: Path, step: float, went_on: float, stepped: float) -> dict[str, Any]:
        """Seconds after the kill, and of the pieces: the longest of ranks that were left, and of one that is new."""
        since = {name: [at - self.killed for at, one in self.events if one == name] for name in MOMENTS}
        every = [span for span in spans(notes) if span.ended > self.killed]
        first = [span for span in spans(notes) if span.ended < self.killed]
        shakes = [span for span in every if span.name == "handshake"]
        return {
            "step": step,
            **{name: max(found) if name != "Planned" else found[-1] for name, found in since.items() if found},
            "goes on": went_on - self.killed,
            "stepped": stepped - self.killed,
            "handshakes": len(shakes) // 2,
            "handshake processor s": sum(span.computed for span in shakes),
            "left": pieces(span for span in every if span.pid in self.left),
            "new": pieces(span for span in every if span.pid not in self.left),
            "first": pieces(first),
        }


def pieces(some: Iterable[Span]) -> dict[str, list[float]]:
    """The longest of each piece, and its processor seconds."""
    found: dict[str, list[Span]] = {}
    for span in some:
        found.setdefault(span.name, []).append(span)
    return {
        name: [max(one.seconds for one in found[name]), max(one.computed for one in found[name])]
        for name in ("join", *PIECES)
        if name in found
    }


@asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    watch, record = Watch(), Membership.record

    def noted(self: Membership, event: Event | Planned) -> None:
        if watch.killed and type(event).__name__ in MOMENTS:
            watch.events.append((time.monotonic(), type(event).__name__))
        record(self, event)

    Membership.record = noted  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Membership.record = record  # type: ignore[method-assign]


def with_fewer(recovery: Recovery) -> None:
    """Let no worker be started again, and nobody wait for one."""
    assert recovery._coordinator.local is not None
    recovery._coordinator.local.renew_no_more()
    recovery.patience = Patience(wait=recovery.patience.wait, restore=recovery.patience.restore)


def end_now(coordinator: Coordinator) -> None:
    """All has been seen."""
    assert coordinator.local is not None
    coordinator.local.renew_no_more()
    for node in coordinator.local.names:
        coordinator.local.kill(node)


async def trained(scene: Scene, root: Path, number: int, notes: Path) -> dict[str, Any]:
    work, name = Work(scene.size, LENGTH, BATCH, root), f"run-{number}"
    async with watched() as watch, opened(work, scene.plan, 10**6, 1, name) as run:
        if not scene.again:
            with_fewer(run.recovery)  # type: ignore[attr-defined]
        ends, went_on, reached = list[float](), 0.0, 0
        async for event in run.events():
            now = time.monotonic()
            if isinstance(event, RunResumed):
                assert event.origin == "memory"
                went_on = now
            elif isinstance(event, RunStepped) and not watch.killed:
                ends.append(now)
                if len(ends) == STEPS:
                    step = statistics.median(b - a for a, b in itertools.pairwise(ends))
                    await asyncio.sleep(step / 2)
                    reached = event.record.step
                    watch.kill([member.facts.pid for member in run.state.ranks])
            elif isinstance(event, RunStepped) and went_on and event.record.step > reached:
                row = watch.row(notes, step, went_on, now)
                end_now(run.coordinator)
                break
    shutil.rmtree(root / name)
    return row


async def served(scene: Scene, root: Path, number: int, notes: Path) -> dict[str, Any]:
    config = EngineConfig(cache_tokens=1024, max_model_len=256)
    folder, params = model_folder(scene.size, root), SamplingParams(max_tokens=3 * TOKENS, ignore_eos=True)
    options = ClusterOptions(threads=1)
    async with watched() as watch, open_cluster(folder, scene.plan, config, options) as serving:
        if not scene.again:
            with_fewer(serving.recovery)
        ends, step = list[float](), 0.0
        async for output in serving.submit(Request(id="one", prompt_ids=(1, 2, 3), params=params)):
            now = time.monotonic()
            if watch.killed and serving.state.epoch > 1:
                went_on = next(at for at, name in reversed(watch.events) if name == "RankReady")
                end_now(serving.coordinator)
                return watch.row(notes, step, went_on, now)
            ends += [now] * len(output.token_ids)
            if len(ends) >= TOKENS and not watch.killed:
                step = statistics.median(b - a for a, b in itertools.pairwise(ends))
                watch.kill([member.facts.pid for member in serving.state.ranks])
    raise AssertionError("the reply ended")


PURPOSE = f"""Where the seconds after the loss of a node go. Workers of one thread each on this machine train
({BATCH} rows of {LENGTH} tokens a step, AdamW in float32) or serve; one is killed by SIGKILL, and the work goes on with
one that is started again in its place, or with fewer."""
READING = """Medians over the rounds. The first table has seconds since the kill, each the last of all ranks: the loss
is `missed`, a new worker has `joined`, parts are `assigned`, all links of all ranks are `linked`, weights and optimizer
states are `loaded`, and the work `goes on`. Then the first step or token that is new has ended, which contains a step
as long as the one `before` the kill. `links`: handshakes of TLS, and processor seconds of both their ends together.

The second table has seconds of pieces, and in brackets how much of them a thread computed: the rest is waiting for
others. Of ranks that were left and of one that is new: to `end` the part before, connect its `links`, and to `load`,
of which the rest are parts: `build` the model, make room for its `learner`, `find` the last step that is whole,
`restore` it, `copy` it for the next loss, and measure the processor's `peak`; or read `weights`.

The third table is what a load costs a rank that goes on with its own weights and optimizer states, beside one that has
nothing: from files, when the run began, and from other ranks' memory, when it takes the place of the lost one."""
LIMITS = """- All ranks share two cores and one memory, so that what machines of their own do side by side is done in
  turns here, and bytes come over loopback.
- The worker is killed in the middle of a step, with its sockets closed at once. A machine that falls silent is missed
  after `--lost-after` and two heartbeats."""


def page(raw: dict[str, list[dict[str, Any]]]) -> Page:
    """The page of raw figures: of each scene some rounds."""
    body = "\n\n".join((moments_table(raw), pieces_table(raw), loads_table(raw)))
    return Page("faults", "recovery-timeline", "The seconds after the loss of a node", PURPOSE, body, READING, LIMITS)


def middle(rounds: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float | None]) -> float | None:
    found = [value for one in rounds if (value := of(one)) is not None]
    return statistics.median(found) if found else None


def words(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def moments_table(raw: dict[str, list[dict[str, Any]]]) -> str:
    keys = ("NodeLost", "NodeJoined", "Planned", "RankPrepared", "RankLoaded", "goes on", "stepped", "step")
    titles = ("missed", "joined", "assigned", "linked", "loaded", "goes on", "new step or token", "before", "links")
    rows = [["s after the kill", *titles]]
    for scene, rounds in raw.items():
        cells = [words(middle(rounds, lambda one, key=key: one.get(key))) for key in keys]  # type: ignore[misc]
        shakes = middle(rounds, lambda one: one["handshakes"])
        took = middle(rounds, lambda one: one["handshake processor s"])
        rows.append([scene, *cells, f"{shakes:.0f} ({words(took)} s)"])
    return table(rows)


def piece(rounds: Sequence[dict[str, Any]], who: str, name: str, place: int) -> float | None:
    return middle(rounds, lambda one: one[who][name][place] if name in one[who] else None)


def pieces_table(raw: dict[str, list[dict[str, Any]]]) -> str:
    rows = [["ranks", "join", *PIECES]]
    for scene, rounds in raw.items():
        for who in ("left", "new"):
            cells = [(piece(rounds, who, name, 0), piece(rounds, who, name, 1)) for name in ("join", *PIECES)]
            if any(took is not None for took, _ in cells):
                shown = ["" if took is None else f"{words(took)} ({words(computed)})" for took, computed in cells]
                rows.append([f"{scene}: {who}", *shown])
    return table(rows)


def loads_table(raw: dict[str, list[dict[str, Any]]]) -> str:
    """By processor seconds, which do not count the waiting for others."""
    rows = [["processor s of a load", "own weights", "from files", "part of it", "from memory", "part of it"]]
    for scene, rounds in raw.items():
        own, files, memory = (piece(rounds, who, "load", 1) for who in ("left", "first", "new"))
        assert own is not None
        parts = ["" if all_of is None else f"{own / all_of:.3f}" for all_of in (files, memory)]
        rows.append([scene, words(own), words(files), parts[0], words(memory), parts[1]])
    return table(rows)


if __name__ == "__main__":
    main()
