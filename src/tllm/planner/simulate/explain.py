"""Where the time of a predicted plan goes: stage by stage in numbers, as bars of a timeline, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.message_time import TimeBreakdown
from tllm.planner.simulate.pipeline import StepTimeline
from tllm.planner.simulate.serving import ServingPrediction
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.plan import Plan

MOST_NAMES = 3

WORDS = {
    "compute": "computing products",
    "memory": "reading weights, keys and values",
    "operations": "starting operations",
    "sending": "sending bytes",
    "latency": "bytes on their way",
    "waiting": "waiting for other stages",
}

WORDS_OF_ROLES = {
    "rewards": "the reward model",
    "sampling": "sampling completions",
    "reference": "the reference's forward pass",
    "teacher": "the teacher beside the student",
}


@dataclass(frozen=True)
class StageBreakdown:
    """Seconds of one stage; the sum of `parts` and `waiting` is the whole time."""

    name: str
    parts: TimeBreakdown
    waiting: float


class TimelineBar(NamedTuple):
    """One thing that a stage does, from `start` to `stop` in seconds; `kind` chooses its colour."""

    start: float
    stop: float
    text: str
    kind: str


@dataclass(frozen=True)
class StageTimeline:
    """What one stage does, in order."""

    name: str
    bars: tuple[TimelineBar, ...]


def turn_breakdowns(predicted: ServingPrediction, names: Sequence[str]) -> list[StageBreakdown]:
    """Each stage in a turn: what it does for all batches in flight, its hops, and what it waits for."""
    turn, accounts = predicted.turn, []
    for name, (batch, hop) in zip(names, turn.stages, strict=True):
        parts = batch.plus(hop).times(turn.batches)
        if parts.seconds > turn.seconds:  # the link sends while its stage computes
            parts = batch.times(turn.batches)
        accounts.append(StageBreakdown(name, parts, max(0.0, turn.seconds - parts.seconds)))
    return accounts


def prefill_breakdowns(predicted: ServingPrediction, names: Sequence[str]) -> list[StageBreakdown]:
    """Each stage while all prompts are computed (prefill)."""
    whole = predicted.load.prompt_seconds(*predicted.chunk)
    accounts = []
    for name, stage in zip(names, predicted.stages, strict=True):
        parts = stage.prefill.times(predicted.load.chunks)
        accounts.append(StageBreakdown(name, parts, max(0.0, whole - parts.seconds)))
    return accounts


class TrainingBreakdown(NamedTuple):
    """Seconds of one stage in a training step."""

    name: str
    busy: float
    """Computing and waiting for messages in its layers."""
    waiting: float
    """Waiting for other stages."""
    gradients: float
    """Exposed all-reduces of gradients, and gathers of weights."""


def training_breakdowns(predicted: StepPrediction, names: Sequence[str]) -> list[TrainingBreakdown]:
    """Each stage in a training step."""
    timeline = predicted.timeline
    if timeline is None:
        return []
    return [
        TrainingBreakdown(name, busy, timeline.total - busy, predicted.gradients)
        for name, busy in zip(names, timeline.busy, strict=True)
    ]


def serving_bottleneck(predicted: ServingPrediction, names: Sequence[str]) -> str:
    """What most of a turn is spent on, and where, in words."""
    turn = predicted.turn
    slowest, parts = max(enumerate(batch for batch, _ in turn.stages), key=lambda stage: stage[1].seconds)
    is_full = turn.batches * parts.seconds >= 0.999 * turn.seconds
    if turn.batches > 1 and len(turn.stages) > 1 and is_full:
        kind, seconds = _largest(parts)
        share = 100 * seconds / parts.seconds
        return f"stage {slowest} on {names[slowest]}, which the others wait for: {share:.0f} % of its time is {kind}"
    whole = TimeBreakdown()
    for batch, hop in turn.stages:
        whole = whole.plus(batch).plus(hop)
    kind, seconds = _largest(whole)
    way = "a token's way round" if predicted.load.facts.reply > 1 else "a prompt's way through"
    return f"{kind}: {100 * seconds / whole.seconds:.0f} % of {way}"


def training_bottleneck(predicted: StepPrediction) -> str:
    """What most of a step's time is spent on, in words."""
    waits = {
        "sums and exchanges inside layers": predicted.layers,
        "waiting for other stages": predicted.pipeline,
        "sums of gradients and gathers of weights": predicted.gradients,
        **{WORDS_OF_ROLES[name]: seconds for name, seconds in predicted.roles},
    }
    kind, seconds = max(waits.items(), key=lambda item: item[1])
    if predicted.compute >= 2 * seconds:
        return f"computing products: {100 * predicted.compute / predicted.seconds:.0f} % of a step"
    return f"{kind}: {100 * seconds / predicted.seconds:.0f} % of a step"


def stage_names(plan: Plan, cluster: Cluster, devices: Sequence[int]) -> list[str]:
    """The nodes of each stage of the first replica; where there are many, the first one and how many more."""
    shown = []
    for stage in range(plan.pp):
        names = [cluster.name(devices[rank]) for rank in plan.ranks(stage)]
        shown.append("+".join(names) if len(names) <= MOST_NAMES else f"{names[0]} and {len(names) - 1} more")
    return shown


def ring_timelines(predicted: ServingPrediction, names: Sequence[str], rounds: int = 2) -> list[StageTimeline]:
    """What stages do while each batch in flight goes round so often, of prompts that no decode step follows so many
    for each stage go through once; the batches begin one after another."""
    stages, batches = predicted.turn.stages, predicted.turn.batches
    if predicted.load.facts.reply == 1:
        batches, rounds = min(batches, rounds * len(stages)), 1
    free = [0.0] * len(stages)
    bars: list[list[TimelineBar]] = [[] for _ in stages]
    ready = [0.0] * batches
    for round_ in range(rounds):
        for index, (computed, hop) in enumerate(stages):
            for batch in range(batches):
                start = max(free[index], ready[batch])
                stop = free[index] = start + computed.seconds
                ready[batch] = stop + hop.seconds
                bars[index].append(TimelineBar(start, stop, f"{batch}.{round_}", "forward"))
    return [StageTimeline(name, tuple(row)) for name, row in zip(names, bars, strict=True)]


def step_timelines(timeline: StepTimeline, names: Sequence[str]) -> list[StageTimeline]:
    """What stages do in a training step."""
    return [
        StageTimeline(name, tuple(TimelineBar(span.start, span.stop, str(span.op), span.op.kind) for span in spans))
        for name, spans in zip(names, timeline.spans, strict=True)
    ]


def _largest(parts: TimeBreakdown) -> tuple[str, float]:
    name = max(TimeBreakdown._fields, key=lambda field: float(getattr(parts, field)))
    return WORDS[name], getattr(parts, name)
