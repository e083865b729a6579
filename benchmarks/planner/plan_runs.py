"""Runs every plan of a list on emulated machines: the seconds of training or of serving, or the memory it takes."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from benchmarks.emulation.cluster_handle import ClusterHandle
from benchmarks.emulation.emulated_machines import EmulatedMachines
from benchmarks.models.random_llama import model_folder
from benchmarks.report.results import commit
from tests.support.training.small_job import write_job
from tllm.cli.arguments.survey_settings import NODE_SECONDS, serving_settings, training_settings
from tllm.cluster.settings import SurveySettings
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.memory.training_memory import training_bytes
from tllm.planner.search.serving_search import best_serving
from tllm.planner.search.training_constraints import MICROBATCHES
from tllm.planner.search.training_search import best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.report.metrics import StepRecord, read_records

CONFIG = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "vocab_size": 1024}
STEPS, LENGTH, ROWS, SIZE = 4, 128, 8, 2
PROMPT, REPLY = 64, 32

ASKED, ASKED_SECONDS = 3, 3.0
"""The fewest replies of a plan in a round, and about how many seconds they take together."""

ROUNDS = 3
"""In each round every plan is run once, with a survey of the machines before and after it."""

BETWEEN = 0.5
"""How long these surveys measure a machine, as a part of the seconds of the first survey, which chooses the plan."""

LONG = 4.0
"""Predicted seconds of a step from which on a plan runs three steps in the first round alone; slow links cause them."""

FAR = 10
"""A plan that is predicted to take so many times as long as the best is not run."""

Places = tuple[int, ...]


@dataclass(frozen=True)
class Tried:
    """A plan on machines, predicted and measured: seconds of a step, seconds of a token after the first, or bytes.

    `early` is predicted by the first survey, which also chooses the plan. `foretold` are the predictions of each round,
    from the surveys before and after its run, `rounds` what was measured. `commit` is that of the program.
    """

    plan: str
    devices: Places
    early: float
    foretold: tuple[float, ...]
    rounds: tuple[float, ...]
    chosen: bool = False
    commit: str = field(default_factory=commit)

    @property
    def predicted(self) -> float:
        return statistics.median(self.foretold)

    @property
    def measured(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float | None:
        """Half of the difference of the slowest and the fastest round, relative to the median; None for one round."""
        return (max(self.rounds) - min(self.rounds)) / 2 / self.measured if len(self.rounds) > 1 else None

    @property
    def error(self) -> float:
        """The median over rounds of how far the measured time is above its prediction."""
        return statistics.median(run / told - 1 for run, told in zip(self.rounds, self.foretold, strict=True))

    def raw(self) -> dict[str, Any]:
        return vars(self) | {"predicted": self.predicted, "measured": self.measured, "error": self.error}


class Step(NamedTuple):
    """A plan on these machines, with microbatches of `size` rows."""

    plan: Plan
    devices: Places
    size: int = SIZE

    @property
    def facts(self) -> TrainingFacts:
        return TrainingFacts(LENGTH, ROWS, self.size)

    def seconds(self, spec: ModelSpec, cluster: Cluster) -> float:
        return PlacedPlan(spec, self.plan, self.facts, cluster, self.devices).predict().seconds

    def run(self, cluster: ClusterHandle, folder: Path, steps: int, save_steps: int = 1000) -> list[StepRecord]:
        keys = {"microbatch_size": self.size, "max_steps": steps, "save_steps": save_steps, "output_dir": folder}
        cluster.train(self.plan, self.devices, keys)
        return read_records(folder / "metrics.jsonl")


def trained(machines: EmulatedMachines, folder: Path) -> Iterator[Tried]:
    """Seconds of a training step."""
    job, spec = _job(folder)
    facts, speeds = TrainingFacts(LENGTH, ROWS, SIZE), machines.shape.speeds
    sizes = [size for size in MICROBATCHES if size <= ROWS]
    settings = training_settings(facts, sizes, "adamw", len(speeds))
    with ClusterHandle(machines, folder, "train", job) as cluster:
        first = cluster.measure(settings)
        best = best_training(spec, cluster_of(first, spec), facts).choices[0].placed
        found = Step(best.plan, best.devices, best.facts.microbatch_size)
        steps = [found, *(Step(*one) for one in training_plans(spec, speeds))]

        def foretell(step: Step, survey: Survey) -> float:
            return step.seconds(spec, cluster_of(survey, spec))

        def run(step: Step) -> float:
            count = STEPS if foretell(step, first) < LONG else 3
            records = step.run(cluster, Path(tempfile.mkdtemp(dir=folder)), count)
            return statistics.median(record.seconds for record in records[1:])

        yield from _marked(cluster, settings, first, steps, foretell, run)


def served(machines: EmulatedMachines, folder: Path) -> Iterator[Tried]:
    """Seconds from one token to the next."""
    model = model_folder("30m", folder, torch.float32)
    spec = spec_from_config(read_config(model))
    facts, speeds = ServingFacts("float32", PROMPT, REPLY, 1), machines.shape.speeds
    settings = serving_settings(
        facts, len(speeds), NODE_SECONDS * len(speeds)
    )  # they share one computer, so they are measured in turn
    with ClusterHandle(machines, folder, "serve", model) as cluster:
        first = cluster.measure(settings)
        best = best_serving(spec, cluster_of(first, spec), facts).choices[0]

        def foretell(way: tuple[Plan, Places], survey: Survey) -> float:
            return predict_serving(spec, way[0], cluster_of(survey, spec), way[1], facts).per_token

        def run(way: tuple[Plan, Places]) -> float:
            asked = max(ASKED, round(ASKED_SECONDS / (REPLY - 1) / foretell(way, first)))
            return statistics.median(cluster.serve(*way, PROMPT, REPLY, asked)) / (REPLY - 1)

        ways = [(best.plan, best.devices), *serving_plans(spec, speeds)]
        yield from _marked(cluster, settings, first, ways, foretell, run)


def held(machines: EmulatedMachines, folder: Path) -> Iterator[Tried]:
    """Peak bytes of the rank that has the most, in new processes for each plan; each step is saved."""
    job, spec = _job(folder)
    for number, (plan, devices) in enumerate(training_plans(spec, machines.shape.speeds)):
        step = Step(plan, devices)
        predicted = max(rank.total for rank in training_bytes(spec, plan, step.facts))
        with ClusterHandle(machines, folder, "train", job) as cluster:
            records = step.run(cluster, folder / f"run-{number}", 3, save_steps=1)
        peak = max(record.memory or 0 for record in records)
        yield Tried(str(plan), devices, predicted, (predicted,), (peak,))


Way = TypeVar("Way", Step, tuple[Plan, Places])


def _marked(
    cluster: ClusterHandle,
    settings: SurveySettings,
    first: Survey,
    ways: list[Way],
    foretell: Callable[[Way, Survey], float],
    run: Callable[[Way], float],
) -> Iterator[Tried]:
    """Run every way in turn, round after round, with a survey after each run; the best by prediction is `chosen`.

    Each run is predicted from the mean of the surveys before and after it, because this machine's speed changes.
    """
    early = {way: foretell(way, first) for way in ways}
    ways = sorted(early, key=lambda way: early[way])
    ways = [way for way in ways if early[way] < FAR * early[ways[0]]]
    brief = msgspec.structs.replace(settings, measure_seconds=BETWEEN * settings.measure_seconds)
    before, measured, foretold = first, defaultdict[Way, list[float]](list), defaultdict[Way, list[float]](list)
    for number in range(ROUNDS):
        for way in ways:
            if number == 0 or early[way] < LONG:
                measured[way].append(run(way))
                after = cluster.measure(brief)
                foretold[way].append(foretell(way, mean_of([before, after])))
                before = after
    for way in ways:
        plan, devices, *_ = way
        told, seconds = tuple(foretold[way]), tuple(measured[way])
        yield Tried(str(plan), devices, early[way], told, seconds, way == ways[0])


def training_plans(spec: ModelSpec, speeds: Sequence[float]) -> Iterator[tuple[Plan, Places]]:
    """Plans that share a step among all machines, evenly and by speed, and the fastest machine alone."""
    count, everybody = len(speeds), tuple(range(len(speeds)))
    shares, layers = ":".join(map(str, _quarters(speeds))), _by_speed(spec.num_layers, speeds)
    texts = [f"dp={count}", f"dp={shares}", f"pp={count}", f"pp={count},layers={layers}"]
    texts += [f"pp={count},layers={layers},schedule=zero_bubble", f"tp={count}", f"tp={count},shares={shares}"]
    yield from dict.fromkeys((Plan.parse(text, spec.num_layers), everybody) for text in texts)
    yield Plan.parse("pp=1", spec.num_layers), (speeds.index(max(speeds)),)


def serving_plans(spec: ModelSpec, speeds: Sequence[float]) -> Iterator[tuple[Plan, Places]]:
    """Plans that share a reply among all machines, evenly and by speed, and the fastest machine alone."""
    count, everybody = len(speeds), tuple(range(len(speeds)))
    texts = [f"pp={count}", f"pp={count},layers={_by_speed(spec.num_layers, speeds)}", f"tp={count}"]
    texts += [f"tp={count},shares=" + ":".join(map(str, _quarters(speeds)))]
    yield from dict.fromkeys((Plan.parse(text, spec.num_layers), everybody) for text in texts)
    yield Plan.parse("pp=1", spec.num_layers), (speeds.index(max(speeds)),)


def mean_of(surveys: list[Survey]) -> Survey:
    """The mean, number by number, of surveys of the same nodes."""
    return msgspec.convert(_mean([msgspec.to_builtins(one) for one in surveys]), Survey)


def _mean(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([one[key] for one in values]) for key in first}
    if isinstance(first, list | tuple):
        return [_mean(list(each)) for each in zip(*values, strict=True)]
    return statistics.fmean(values) if isinstance(first, float) else first


def _job(folder: Path) -> tuple[Path, ModelSpec]:
    job = write_job(folder, CONFIG, seq_len=LENGTH, global_batch_size=ROWS, microbatch_size=SIZE)
    return job, spec_from_config(read_config(folder))


def _quarters(speeds: Sequence[float]) -> list[int]:
    """Each machine's share, in quarters of the fastest machine's speed."""
    shares = [max(1, round(4 * speed / max(speeds))) for speed in speeds]
    return [share // math.gcd(*shares) for share in shares]


def _by_speed(layers: int, speeds: Sequence[float]) -> str:
    """Layers of each stage in proportion to its machine's speed, at least one."""
    counts = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        lacks = [layers * speed / sum(speeds) - count for speed, count in zip(speeds, counts, strict=True)]
        counts[max(reversed(range(len(counts))), key=lambda stage: lacks[stage])] += 1
    return "+".join(map(str, counts))
