"""The planner marked by reality: `python benchmarks/planning.py [--clusters N] [--goal serve|train]` (as root).

This machine is cut into two to four, unequal in speed and joined by shaped links. On each such cluster the survey
is taken, every plan of a list is predicted from it and then run, for serving and for training; the table shows both,
and what the chosen plan loses against the best of all that were run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import write
from shapes import model_folder
from throttled import Machines, Shape, said

sys.path.append(str(Path(__file__).parents[1]))
import torch

from tests.support.hosts import why_not
from tests.support.small_job import write_job
from tllm.cli.options import read_spec
from tllm.cli.tables import table
from tllm.planner.cluster import Cluster
from tllm.planner.load import ServingFacts
from tllm.planner.placed import Placed
from tllm.planner.ranks import TrainingFacts
from tllm.planner.search import best_serving
from tllm.planner.search_training import best_training
from tllm.planner.serving import predict_serving
from tllm.planner.survey import FILE, Goal, cluster_of, read_survey
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.train.metrics import StepRecord, read_records

SPEEDS = ((0.8, 0.8), (0.8, 0.4), (0.9, 0.3), (0.8, 0.2), (0.6, 0.6, 0.6), (0.8, 0.4, 0.4), (0.4, 0.4, 0.4, 0.4))
NETWORKS = (("1gbit", 0.0), ("100mbit", 0.0), ("100mbit", 5.0), ("20mbit", 20.0))
SHAPES = tuple(
    Shape(SPEEDS[(place + turn) % len(SPEEDS)], rate, delay)
    for turn in range(6)
    for place, (rate, delay) in enumerate(NETWORKS)
)
"""24 clusters; the first few differ in everything."""

CONFIG = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "vocab_size": 1024}
STEPS, LENGTH, ROWS, SIZE = 8, 128, 8, 2
PROMPT, REPLY, ASKED = 64, 32, 2
HOW = """
A machine of speed 0.4 computes with one thread that is held back to 0.4 of its speed here, in steps of less than a
millisecond (benchmarks/slower); all speeds together are less than the processors that there are, so that no rank waits
for another's. Links are shaped in the kernel, each direction for itself; delays are a relay's."""

COOL = 2
"""Steps at the beginning that do not count; one, where steps are long."""

LONG = 2.0
"""Seconds of a step, as predicted, of which fewer are taken."""

ASK = """
import json, sys, time, urllib.request
url, prompt, reply, asked = sys.argv[1], *map(int, sys.argv[2:])
def took(start, tokens):
    body = dict(prompt=[start + i for i in range(prompt)], max_tokens=tokens, temperature=0, ignore_eos=True)
    headers = {"content-type": "application/json"}
    begun = time.perf_counter()
    urllib.request.urlopen(urllib.request.Request(url + "/completions", json.dumps(body).encode(), headers)).read()
    return time.perf_counter() - begun
took(1, 4)
print(json.dumps([[took(200 * n + 3, 1), took(200 * n + 107, reply)] for n in range(1, asked + 1)]))
"""
"""Seconds of a reply of one token, and of a whole one, some times, after one that does not count."""


@dataclass(frozen=True)
class Tried:
    """A plan on machines: seconds (of a step; of a token after the first) as predicted and as measured, and memory."""

    plan: str
    devices: tuple[int, ...]
    predicted: float
    measured: float
    memory: tuple[float, float] | None = None
    chosen: bool = False

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--clusters", type=int, default=len(SHAPES), help="how many of the %(default)s")
    words.add_argument("--skip", type=int, default=0, help="so many of them at the beginning")
    words.add_argument("--goal", choices=("serve", "train"), help="one of the two alone")
    words.add_argument("--quick", action="store_true", help="the chosen plan and two others alone")
    args = words.parse_args()
    if reason := why_not():
        sys.exit(reason)
    goals: list[Goal] = [args.goal] if args.goal else ["train", "serve"]
    found, failed = list[tuple[Shape, Goal, list[Tried]]](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        for number, shape in enumerate(SHAPES[args.skip :][: args.clusters]):
            for goal in goals:
                folder = Path(place) / f"{number}-{goal}"
                folder.mkdir()
                try:
                    with Machines(shape) as machines:
                        tried = list((trained if goal == "train" else served)(machines, folder, args.quick))
                except RuntimeError as error:  # of a command, with what it said last
                    failed.append(f"- {shape}, {goal}: {str(error).splitlines()[-1]}")
                    print(shape, goal, error, flush=True)
                    continue
                found.append((shape, goal, tried))
                print(f"{shape}, {goal}:\n{table(rows(tried))}\n", flush=True)
            save(goals, found, failed)


def save(goals: list[Goal], found: list[tuple[Shape, Goal, list[Tried]]], failed: list[str]) -> None:
    """The page, of all clusters so far."""
    ended = ["Ended by an error:", *failed] if failed else []
    notes = "\n".join([*(told(goal, found) for goal in goals if any(of == goal for _, of, _ in found)), *ended, HOW])
    text = "\n\n".join(f"## {shape}: {goal}\n\n```\n{table(rows(tried))}\n```" for shape, goal, tried in found)
    raw = {f"{shape} {goal}": [vars(one) for one in tried] for shape, goal, tried in found}
    write("planning", "Predicted and measured: every plan on clusters made here", text, raw, notes)


def rows(tried: list[Tried]) -> list[list[str]]:
    lines = [["plan", "machines", "predicted ms", "measured ms", "error", "memory", ""]]
    for one in sorted(tried, key=lambda one: one.measured):
        memory = "" if one.memory is None else f"{100 * (one.memory[1] / one.memory[0] - 1):+.1f} %"
        numbers = [f"{1e3 * one.predicted:.1f}", f"{1e3 * one.measured:.1f}", f"{100 * one.error:+.1f} %", memory]
        lines.append([one.plan, " ".join(map(str, one.devices)), *numbers, "chosen" if one.chosen else ""])
    return lines


def told(goal: Goal, found: list[tuple[Shape, Goal, list[Tried]]]) -> str:
    """How far predictions of a goal were off, and what the chosen plan lost against the best that was run."""
    some = [tried for _, of, tried in found if of == goal]
    errors = sorted(abs(one.error) for tried in some for one in tried)
    within = sum(error <= 0.15 for error in errors)
    lost = [
        next(one for one in tried if one.chosen).measured / min(one.measured for one in tried) - 1 for tried in some
    ]
    memory = [one.memory[1] / one.memory[0] - 1 for tried in some for one in tried if one.memory is not None]
    text = (
        f"- To {goal}: {len(errors)} runs; error of the prediction {100 * statistics.fmean(errors):.1f} % on an "
        f"average, {100 * statistics.median(errors):.1f} % in the middle, {100 * errors[-1]:.1f} % at worst; {within} "
        f"runs within 15 %. The chosen plan took {100 * statistics.fmean(lost):.1f} % longer than the best "
        f"that was run, {100 * max(lost):.1f} % at worst; in {lost.count(0)} of {len(lost)} clusters it was the best."
    )
    if memory:
        text += f" Peak memory was {100 * min(memory):+.1f} to {100 * max(memory):+.1f} % of what was predicted."
    return text


def trained(machines: Machines, folder: Path, quick: bool) -> Iterator[Tried]:
    """Every plan of a step of training."""
    sizes = dict(seq_len=LENGTH, global_batch_size=ROWS, microbatch_size=SIZE, max_steps=STEPS, save_steps=1000)
    job = write_job(folder, CONFIG, **sizes)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text((folder / "config.json").read_text())
    spec = read_spec(model)
    words = ["--batch", str(ROWS), "--seq", str(LENGTH)]
    cluster = surveyed(machines, folder, model, spec, "train", words)
    facts = TrainingFacts(LENGTH, ROWS, SIZE)
    best = best_training(spec, cluster, facts).choices[0].placed
    plans = [(best.plan, best.devices, best.facts.microbatch_size)]
    plans += [(plan, devices, SIZE) for plan, devices in training_plans(spec, cluster)]
    chosen = min(plans, key=lambda one: _step(spec, cluster, *one).predict().seconds)
    for number, (plan, devices, size) in enumerate(_few(dict.fromkeys(plans), chosen, quick)):
        placed = _step(spec, cluster, plan, devices, size)
        predicted, memory = placed.predict().seconds, max(one.total for one in placed.memory())
        steps, cool = (STEPS, COOL) if predicted < LONG else (3, 1)
        how = {"microbatch_size": size, "max_steps": steps}
        records = train(machines, folder, job, plan, devices, how, f"run-{number}")
        measured = statistics.median(record.seconds for record in records[cool:])
        most = max(record.memory or 0 for record in records)
        yield Tried(str(plan), devices, predicted, measured, (memory, most), (plan, devices, size) == chosen)


def training_plans(spec: ModelSpec, cluster: Cluster) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """The ways to share a step among all machines, evenly and by their speed, and the fastest alone."""
    count, everybody = len(cluster), tuple(range(len(cluster)))
    speeds = [cluster.devices[place].matrix_rate("float32", LENGTH) for place in everybody]
    shares = _quarters(speeds)
    layers = _by_speed(spec.num_layers, speeds)
    texts = [f"dp={count}", "dp=" + ":".join(map(str, shares)), f"pp={count}"]
    texts += [f"pp={count},layers={layers}", f"pp={count},layers={layers},schedule=zero_bubble", f"tp={count}"]
    texts += [f"tp={count},shares=" + ":".join(map(str, shares))]
    yield from dict.fromkeys((Plan.parse(text, spec.num_layers), everybody) for text in texts)
    yield Plan.parse("pp=1", spec.num_layers), (speeds.index(max(speeds)),)


def train(
    machines: Machines, folder: Path, job: Path, plan: Plan, devices: tuple[int, ...], how: dict[str, int], name: str
) -> list[StepRecord]:
    """Run a job under a plan on these machines, with these of its keys set."""
    words = ["train", str(job), "--plan", str(plan), "--threads", "1", "--quiet", "--on-loss", "end"]
    for key, value in {**how, "output_dir": folder / name}.items():
        words += ["--set", f"{key}={value}"]
    run, _ = together(machines, folder, devices, name, words)
    if run.wait(300):
        raise RuntimeError((folder / f"{name}.log").read_text()[-2000:])
    machines.end()
    return read_records(folder / name / "metrics.jsonl")


def served(machines: Machines, folder: Path, quick: bool) -> Iterator[Tried]:
    """Every plan of a reply."""
    model = model_folder("30m", folder, torch.float32)
    spec = read_spec(model)
    words = ["--prompt", str(PROMPT), "--reply", str(REPLY)]
    cluster = surveyed(machines, folder, model, spec, "serve", words)
    facts = ServingFacts("float32", PROMPT, REPLY, 1)
    best = best_serving(spec, cluster, facts).choices[0]
    plans = [(best.plan, best.devices), *serving_plans(spec, cluster)]
    chosen = min(plans, key=lambda one: predict_serving(spec, one[0], cluster, one[1], facts).seconds)
    for number, (plan, devices) in enumerate(_few(dict.fromkeys(plans), chosen, quick)):
        predicted = predict_serving(spec, plan, cluster, devices, facts)
        measured = serve(machines, folder, model, plan, devices, f"serve-{number}")
        yield Tried(str(plan), devices, predicted.per_token, measured, None, (plan, devices) == chosen)


def serving_plans(spec: ModelSpec, cluster: Cluster) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    count, everybody = len(cluster), tuple(range(len(cluster)))
    speeds = [cluster.devices[place].read for place in everybody]
    shares = ":".join(map(str, _quarters(speeds)))
    texts = [f"pp={count}", f"pp={count},layers={_by_speed(spec.num_layers, speeds)}", f"tp={count}"]
    yield from dict.fromkeys(
        (Plan.parse(text, spec.num_layers), everybody) for text in [*texts, f"tp={count},shares={shares}"]
    )
    yield Plan.parse("pp=1", spec.num_layers), (speeds.index(max(speeds)),)


def serve(machines: Machines, folder: Path, model: Path, plan: Plan, devices: tuple[int, ...], name: str) -> float:
    """Seconds from one token to the next."""
    words = ["serve", str(model), "--plan", str(plan), "--threads", "1", "--port", "0", "--max-model-len", "512"]
    server, log = together(machines, folder, devices, name, words)
    url = said(log, r"serving .* at (\S+)", server)[1]
    times = json.loads(machines.ask(devices[0], sys.executable, "-c", ASK, url, *map(str, (PROMPT, REPLY, ASKED))))
    machines.end()
    return statistics.median((last - first) / (REPLY - 1) for first, last in times)


def together(
    machines: Machines, folder: Path, devices: tuple[int, ...], name: str, words: list[str]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a command on the first of these machines, and let the others join it."""
    log = folder / f"{name}.log"
    if len(devices) > 1:
        words += ["--nodes", str(len(devices)), "--cluster-host", machines.hosts.addresses[devices[0]]]
    command = machines.start(devices[0], log, *words, cwd=folder)
    for device in devices[1:]:
        line = said(log, r"tllm join (\S+) --token (\S+)", command)
        joined = folder / f"{name}-{device}.log"
        node = machines.start(device, joined, "join", line[1], "--token", line[2], "--threads", "1")
        said(joined, "joined the cluster", node)  # ranks go by the order in which nodes come
    return command, log


def surveyed(machines: Machines, folder: Path, model: Path, spec: ModelSpec, goal: Goal, words: list[str]) -> Cluster:
    """The cluster as `tllm plan` measures it."""
    everybody = tuple(range(len(machines.shape.speeds)))
    keep = folder / "kept"
    words = ["plan", str(model), "--goal", goal, "--keep", str(keep), "--threads", "1", *words]
    command, log = together(machines, folder, everybody, "survey", words)
    if command.wait(300):
        raise RuntimeError(log.read_text()[-2000:])
    machines.end()
    survey = read_survey(keep / FILE)
    assert survey is not None, "it was kept"
    return cluster_of(survey, spec)


def _step(spec: ModelSpec, cluster: Cluster, plan: Plan, devices: tuple[int, ...], size: int) -> Placed:
    return Placed(spec, plan, TrainingFacts(LENGTH, ROWS, size), cluster, devices)


def _few(plans: Any, chosen: Any, quick: bool) -> list[Any]:
    """All, or the chosen one and two more."""
    return list(dict.fromkeys([chosen, *plans]))[: 3 if quick else None]


def _quarters(speeds: list[float]) -> list[int]:
    """Shares in quarters of the fastest."""
    shares = [max(1, round(4 * speed / max(speeds))) for speed in speeds]
    return [share // math.gcd(*shares) for share in shares]


def _by_speed(layers: int, speeds: list[float]) -> str:
    """Layers of each stage in proportion to speed, one at the least."""
    counts = [max(1, round(layers * speed / sum(speeds))) for speed in speeds]
    counts[counts.index(max(counts))] += layers - sum(counts)
    return "+".join(map(str, counts))


if __name__ == "__main__":
    main()
