"""By which plan machines hold one model together that answers training runs (`tllm teach`, `tllm rollout`): every
choice of machines and plan is predicted for one question of a run.

The first machine, which runs reach, always has the first rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tllm.core.errors import CapacityError, PlanError
from tllm.core.memory import amount
from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.device_kinds import counts_upto, kinds_of
from tllm.planner.cost.rank_work import JudgeFacts, TrainingFacts
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.roles.role_divisions import divisions
from tllm.planner.roles.role_room import Room, judge_room, rollout_room
from tllm.planner.simulate.role_seconds import group_seconds, row_seconds
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

MOST_DEVICES = 6
"""Machines beside the first of which every choice is tried; of more the fastest, and those with most memory."""


class AnsweringLoad(Protocol):
    """What a run asks of the model at once: one question."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokens(self) -> int:
        """That an answer is about: those of a row that is judged, those of the completions that are sampled."""

    def room(self, cluster: Cluster, plan: Plan | None) -> Room:
        """What devices need that hold the model by this plan; without one, alone."""

    def seconds(self, cluster: Cluster, plan: Plan, devices: Sequence[int]) -> float:
        """Of one answer."""


@dataclass(frozen=True)
class RowLoad:
    """A teacher judges a row, in one forward pass."""

    judge: JudgeFacts

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, row: int) -> RowLoad:
        """Rows of so many tokens."""
        return cls(JudgeFacts(spec, dtype, row, row))

    @property
    def spec(self) -> ModelSpec:
        return self.judge.spec

    @property
    def tokens(self) -> int:
        return self.judge.row

    def room(self, cluster: Cluster, plan: Plan | None) -> Room:
        return judge_room(cluster, "teach", replace(self.judge, plan=plan))

    def seconds(self, cluster: Cluster, plan: Plan, devices: Sequence[int]) -> float:
        return row_seconds(replace(self.judge, plan=plan), cluster.as_serving(), *devices)


@dataclass(frozen=True)
class GroupLoad:
    """A policy samples the completions of `groups` prompts, each of which is computed once for all of its own."""

    spec: ModelSpec
    facts: TrainingFacts
    sampling: SamplingFacts

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, sampling: SamplingFacts) -> GroupLoad:
        """As many prompts as a run asks at once are the `groups` of `sampling`."""
        rows = sampling.groups * sampling.num_generations
        return cls(spec, TrainingFacts(sampling.context, rows, dtype=dtype, sampling=sampling), sampling)

    @property
    def tokens(self) -> int:
        return self.sampling.groups * self.sampling.num_generations * self.sampling.completion

    def room(self, cluster: Cluster, plan: Plan | None) -> Room:
        return rollout_room(cluster, self.spec, self._divided(plan))

    def seconds(self, cluster: Cluster, plan: Plan, devices: Sequence[int]) -> float:
        facts = self._divided(plan)
        return group_seconds(self.spec, facts, cluster.as_serving(), self.sampling.groups, *devices)

    def _divided(self, plan: Plan | None) -> TrainingFacts:
        return replace(self.facts, sampling=replace(self.sampling, plan=plan))


@dataclass(frozen=True)
class AnsweringChoice:
    """A plan and the device of each of its ranks. `seconds`: of one answer; `held`: bytes of the fullest device."""

    plan: Plan
    devices: tuple[int, ...]
    seconds: float
    held: int


def answering_choices(cluster: Cluster, load: AnsweringLoad) -> list[AnsweringChoice]:
    """Every plan that has room, the fastest first; of those that are as fast, that of the fewest machines.

    CapacityError where there is none.
    """
    whole, layers = load.room(cluster, None), load.spec.num_layers
    by_layer = load.room(cluster, Plan.parse(f"pp={layers}", layers)).parts
    found = list[AnsweringChoice]()
    for devices in _orders(cluster, whole):
        size = len(devices)
        plans = divisions(whole, by_layer, devices, size) if size > 1 else [Plan.parse("pp=1", layers)]
        for plan in plans:
            with contextlib.suppress(PlanError):  # heads that so many cannot share
                found += _predicted(cluster, load, plan, devices)
    if not found:
        has = ", ".join(f"{cluster.name(one)} {amount(device.memory)}" for one, device in enumerate(cluster.devices))
        raise CapacityError(
            f"no plan has room: the model needs {amount(whole.needs)} to {whole.does}, and the machines have {has}",
            "give more or larger machines, or --plan",
        )
    return sorted(found, key=lambda one: (one.seconds, len(one.devices)))


def given_choice(cluster: Cluster, load: AnsweringLoad, plan: Plan, devices: Sequence[int]) -> AnsweringChoice:
    """The same of one plan on these devices, which are taken to have room."""
    room = load.room(cluster, plan)
    return AnsweringChoice(plan, tuple(devices), load.seconds(cluster, plan, devices), room.needs)


def _predicted(cluster: Cluster, load: AnsweringLoad, plan: Plan, devices: Sequence[int]) -> list[AnsweringChoice]:
    room = load.room(cluster, plan)
    return [given_choice(cluster, load, plan, devices)] if room.fits(devices) else []


def _orders(cluster: Cluster, whole: Room) -> Iterator[tuple[int, ...]]:
    """Devices that may hold the model, in the order of their parts: the first, and of the others the fastest before
    slower ones, or those that have more memory before."""
    others = [device for device in range(1, len(cluster)) if whole.knows(device)]
    if not whole.knows(0):
        return
    orders = [sorted(others, key=key, reverse=True) for key in (whole.quickness, whole.strength)]
    found = dict.fromkeys(tuple(order[:count]) for order in orders for count in range(len(others) + 1))
    if len(others) <= MOST_DEVICES:
        kinds = kinds_of(cluster, others)
        for counts in counts_upto(tuple(map(len, kinds)), len(others)):
            some = {device for kind, count in zip(kinds, counts, strict=True) for device in kind[:count]}
            found |= dict.fromkeys(tuple(device for device in order if device in some) for order in orders)
    yield from ((0, *order) for order in found)
