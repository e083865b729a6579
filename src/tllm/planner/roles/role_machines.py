"""Which machines teach, sample, score and train: every choice is tried, with the seconds of a step of all of them
together.

A machine with a role computes a model, the teacher, the policy or the reward model, and has no rank of the plan;
several compute one together where the job says by which plan. Rows of the data are judged while the student learns from
those of the step before, so that the slower of both counts. Completions must be there before they are judged (`lmbda`),
scored or learned from, so that what they take comes on top.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import get_args

from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.device_kinds import counts_upto, kinds_of
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.roles.role_divisions import divisions
from tllm.planner.roles.role_room import Room, judge_room, rollout_room
from tllm.planner.roles.teacher_machines import Taught, teaching_seconds
from tllm.planner.search.training_search import TrainingChoice
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName

MOST_DEVICES = 8
"""Devices of which every choice for a role is tried; of more those that are fastest, and those that are slowest, of all
and of those that have room for any part of its model."""

Devices = tuple[int, ...]

BestPlan = Callable[[Cluster, TrainingFacts], TrainingChoice]
"""best(cluster, facts): the best plan on these devices, of whose roles the facts have those that ranks do themselves.

CapacityError or PlanError where there is none.
"""


@dataclass(frozen=True)
class RoleWish:
    """Which devices may have a role: these, which get the parts of its models in this order; or any so many; or any
    number, none among them. `divides`: whether it is to be chosen too by which plan several divide one model; else that
    of the facts does."""

    devices: Devices | None = None
    count: int | None = None
    divides: bool = False


ANY = RoleWish()


@dataclass(frozen=True)
class RolesAsked:
    """What is asked: a job, whose `facts` have all its roles as if ranks did them; of what the teacher says, where
    there is one; and by role ("teacher", "rollout", "reward") the devices that may have it, where others than ranks
    may."""

    spec: ModelSpec
    facts: TrainingFacts
    wishes: Mapping[RoleName, RoleWish]
    taught: Taught | None = None


@dataclass(frozen=True)
class RoleChoice:
    """Who does what, and what a step takes. Numbers of devices are those of the whole cluster."""

    teachers: Devices
    """Where there is none, a teacher is beside the student, on the device of rank 0."""
    rollouts: Devices
    """Where there is none, the ranks that train sample."""
    training: TrainingChoice
    """The plan, and the device of each of its ranks. What it predicts has the seconds of sampling, wherever that is
    done, but not those of teachers elsewhere."""
    teaching: float
    """Seconds in which the teachers judge the rows of a step."""
    seconds: float
    """Of a step, of all together."""
    rewards: Devices = ()
    """Those that score completions. Where there is none, the process of rank 0 does."""
    held: Mapping[RoleName, int] = field(default_factory=dict)
    """Bytes that a device with a role alone holds, the most."""
    plans: Mapping[RoleName, Plan] = field(default_factory=dict)
    """By which devices that have a role alone divide its model, where several do."""

    @property
    def by_role(self) -> Mapping[RoleName, Devices]:
        """The devices that have a role alone."""
        return {"teacher": self.teachers, "rollout": self.rollouts, "reward": self.rewards}

    @property
    def seconds_by_role(self) -> Mapping[RoleName, float]:
        """Of a step, those of each role, wherever it is done."""
        roles = dict(self.training.predicted.roles)
        return {"teacher": self.teaching, "rollout": roles.get("sampling", 0.0), "reward": roles.get("rewards", 0.0)}

    @property
    def policy(self) -> Devices:
        """The device of each rank."""
        return self.training.placed.devices


def role_choices(cluster: Cluster, asked: RolesAsked, best: BestPlan) -> list[RoleChoice]:
    """The best plan for each choice of devices for the roles, the fastest first. Device 0, which has the data, trains.

    CapacityError where no choice has room, or a device that is named has none for its role.
    """
    found, why = list[RoleChoice](), "too few machines have room for their models"
    search, named = _Search(cluster, best), {device for wish in asked.wishes.values() for device in wish.devices or ()}
    roles = {role: (asked.wishes.get(role), _rooms(cluster, asked, role)) for role in get_args(RoleName)}
    for teachers, teaches in _sets(cluster, *roles["teacher"], named):
        for rollouts, samples in _sets(cluster, *roles["rollout"], named.union(teachers)):
            for rewards, scores in _sets(cluster, *roles["reward"], named.union(teachers, rollouts)):
                apart = (*teachers, *rollouts, *rewards)
                if len(set(apart)) < len(apart):  # of those that are named
                    continue
                chosen: dict[RoleName, Room | None] = {"teacher": teaches, "rollout": samples, "reward": scores}
                held = {role: room.needs for role, room in chosen.items() if room is not None}
                plans = {role: room.plan for role, room in chosen.items() if room is not None and room.plan is not None}
                try:
                    one = _choice(_divided(asked, plans), search, teachers, rollouts, rewards)
                except (CapacityError, PlanError) as error:
                    why = error.message
                else:
                    plans = {role: plan for role, plan in plans.items() if one.by_role[role]}
                    found.append(replace(one, held=held, plans=plans))
    if not found:
        raise CapacityError(f"no choice of machines for the roles has room: {why}", "give more or larger machines")
    return sorted(found, key=lambda choice: choice.seconds)


def _sets(
    cluster: Cluster, wish: RoleWish | None, rooms: Sequence[Room], taken: Set[int]
) -> Iterator[tuple[Devices, Room | None]]:
    """Sets of devices that may have a role, with the room that those need which hold one model together, by each plan
    that may be chosen; of devices that are alike the last ones, as the first are nearer to the data.

    CapacityError where one that is named has no room.
    """
    if wish is None or not rooms:
        yield (), next(iter(rooms), None)
        return
    if wish.devices is not None:
        yield from _of_named(wish.devices, rooms)
        return
    for room in rooms:
        for devices in _of_any(cluster, wish, room, taken):
            placed = room.placed(devices)
            if room.fits(placed) and (devices or room is rooms[0]):
                yield placed, room


def _of_named(devices: Devices, rooms: Sequence[Room]) -> Iterator[tuple[Devices, Room]]:
    """These devices, by each plan by which all of them have room. CapacityError where there is none."""
    faults, fitting = list[CapacityError](), 0
    for room in rooms:
        try:
            for place, device in enumerate(devices):
                room.check(device, place)
        except CapacityError as error:
            faults.append(error)
        else:
            fitting += 1
            yield devices, room
    if not fitting:
        raise faults[0]


def _of_any(cluster: Cluster, wish: RoleWish, room: Room, taken: Set[int]) -> Iterator[Devices]:
    able = [device for device in range(1, len(cluster)) if device not in taken and room.is_there(device)]
    most = len(able) if wish.count is None else min(wish.count, len(able))
    sizes = range(wish.count or 0, most + 1, room.size)
    if 0 in sizes:
        yield ()
    if len(able) > MOST_DEVICES:
        by_speed = sorted(able, key=room.seconds)
        both = by_speed, [device for device in by_speed if room.is_for_all(device)]
        for count in filter(None, sizes):
            ends = (some for of in both if len(of) >= count for some in (of[:count], of[-count:]))
            yield from dict.fromkeys(tuple(sorted(some)) for some in ends)
        return
    kinds = kinds_of(cluster, able)
    for counts in counts_upto(tuple(map(len, kinds)), len(able)):
        if sum(counts) in sizes:
            yield tuple(sorted(d for kind, count in zip(kinds, counts, strict=True) for d in kind[len(kind) - count :]))


def _rooms(cluster: Cluster, asked: RolesAsked, role: RoleName) -> list[Room]:
    """One for each plan by which the role's model may be divided, the given one first; none of a role that the job does
    not have."""
    wish, given = asked.wishes.get(role), _room(cluster, asked, role)
    if given is None or wish is None or not wish.divides:
        return [] if given is None else [given]
    count = len(wish.devices) if wish.devices is not None else wish.count
    found, layers = [given], _layers(asked, role)
    one_by_one = _room(cluster, _divided(asked, {role: Plan.parse(f"pp={layers}", layers)}), role)
    assert one_by_one is not None, "the job has the role"
    for size in range(2, min(count or len(cluster) - 1, MOST_DEVICES) + 1):
        if (count or size) % size:
            continue
        for plan in divisions(given, one_by_one.parts, wish.devices, size):
            with contextlib.suppress(PlanError):  # heads that so many cannot share
                room = _room(cluster, _divided(asked, {role: plan}), role)
                if room is not None:
                    found.append(room)
    return found


def _room(cluster: Cluster, asked: RolesAsked, role: RoleName) -> Room | None:
    facts, taught = asked.facts, asked.taught
    if role == "teacher":
        return None if taught is None else judge_room(cluster, "teach", taught.teacher)
    if role == "rollout":
        return None if facts.sampling is None else rollout_room(cluster, asked.spec, facts)
    return None if facts.reward is None else judge_room(cluster, "score", facts.reward)


def _divided(asked: RolesAsked, plans: Mapping[RoleName, Plan]) -> RolesAsked:
    """The same with other plans by which devices divide the models of these roles."""
    facts, taught = asked.facts, asked.taught
    if (plan := plans.get("teacher")) is not None and taught is not None:
        taught = replace(taught, teacher=replace(taught.teacher, plan=plan))
    if (plan := plans.get("rollout")) is not None and facts.sampling is not None:
        facts = replace(facts, sampling=replace(facts.sampling, plan=plan))
    if (plan := plans.get("reward")) is not None and facts.reward is not None:
        facts = replace(facts, reward=replace(facts.reward, plan=plan))
    return replace(asked, facts=facts, taught=taught)


def _layers(asked: RolesAsked, role: RoleName) -> int:
    """Of the model that a role computes."""
    taught, reward = asked.taught, asked.facts.reward
    if role == "teacher" and taught is not None:
        return taught.teacher.spec.num_layers
    return reward.spec.num_layers if role == "reward" and reward is not None else asked.spec.num_layers


class _Search:
    """Best plans on what is left of a cluster, each searched for once, whoever of the others has which role."""

    def __init__(self, cluster: Cluster, best: BestPlan) -> None:
        self.cluster, self._best = cluster, best
        self._known: dict[tuple[Devices, bool, bool, bool], TrainingChoice | CapacityError | PlanError] = {}

    def on(self, devices: Devices, facts: TrainingFacts) -> TrainingChoice:
        """The best plan, whose devices are numbered as in the whole cluster."""
        key = devices, facts.teacher is None, facts.sampling is None, facts.reward is None
        if key not in self._known:
            try:
                self._known[key] = self._found(devices, facts)
            except (CapacityError, PlanError) as error:
                self._known[key] = error
        known = self._known[key]
        if not isinstance(known, TrainingChoice):
            raise known
        return known

    def _found(self, devices: Devices, facts: TrainingFacts) -> TrainingChoice:
        part = replace(
            self.cluster,
            devices=tuple(self.cluster.devices[device] for device in devices),
            node_of=tuple(self.cluster.node_of[device] for device in devices),
        )
        found = self._best(part, facts)
        taken = tuple(devices[device] for device in found.placed.devices)
        return replace(found, placed=replace(found.placed, cluster=self.cluster, devices=taken))


def _choice(asked: RolesAsked, search: _Search, teachers: Devices, rollouts: Devices, rewards: Devices) -> RoleChoice:
    cluster, facts, sampling, taught = search.cluster, asked.facts, asked.facts.sampling, asked.taught
    trains = tuple(device for device in range(len(cluster)) if device not in (*teachers, *rollouts, *rewards))
    own = replace(
        facts,
        teacher=None if teachers else facts.teacher,
        sampling=None if rollouts or sampling is None else replace(sampling, plan=None),
        reward=None if rewards else facts.reward,
    )
    training = search.on(trains, own)
    if rollouts or rewards:
        placed = training.placed
        apart = replace(placed.facts, sampling=sampling and replace(sampling, servers=rollouts))
        apart = replace(apart, reward=facts.reward and replace(facts.reward, devices=rewards))
        placed = replace(placed, facts=apart)
        training = replace(training, placed=placed, predicted=placed.predict())
    predicted = training.predicted
    if not teachers or taught is None:
        teaching = dict(predicted.roles).get("teacher", 0.0)
        return RoleChoice(teachers, rollouts, training, teaching, predicted.seconds, rewards)
    teaching = teaching_seconds(cluster, taught, teachers, training.placed.devices[0])
    return RoleChoice(teachers, rollouts, training, teaching, taught_seconds(predicted, taught, teaching), rewards)


def taught_seconds(predicted: StepPrediction, taught: Taught, teaching: float) -> float:
    """Of a step that was predicted without its teachers, who are elsewhere and take so long."""
    roles = sum(seconds for _, seconds in predicted.roles)
    apart = max(predicted.policy, teaching)
    return roles + taught.lmbda * (predicted.policy + teaching) + (1 - taught.lmbda) * apart
