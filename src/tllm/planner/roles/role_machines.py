"""Which machines teach, which sample and which train: every choice, with the seconds of a step of all together.

A machine with a role computes a whole model, the teacher or the policy, and has no rank of the plan. Rows of the data
are judged while the student learns from those of the step before, so that the slower of both counts. Completions must
be there before they are judged (`lmbda`) or learned from, so that what they take comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.alike import counts_upto, kinds_of
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.roles.role_room import Room, rollout_room, teacher_room
from tllm.planner.roles.teacher_machines import Taught, teaching_seconds
from tllm.planner.search.training_search import TrainingChoice
from tllm.spec.model_spec import ModelSpec
from tllm.spec.process_groups import RoleName

MOST_DEVICES = 8
"""Devices of which every choice for a role is tried; of more those that are fastest, and those that are slowest."""

Devices = tuple[int, ...]

BestPlan = Callable[[Cluster, TrainingFacts], TrainingChoice]
"""best(cluster, facts): the best plan on these devices, of whose roles the facts have those that ranks do themselves.

CapacityError or PlanError where there is none.
"""


@dataclass(frozen=True)
class RoleWish:
    """Which devices may have a role: these, or any so many, or any number, none among them."""

    devices: Devices | None = None
    count: int | None = None


ANY = RoleWish()


@dataclass(frozen=True)
class RolesAsked:
    """What is asked: a job, whose `facts` have all its roles as if ranks did them; of what the teacher says, where
    there is one; and by role ("teacher", "rollout", "reward") the devices that may have it, where others than ranks
    may. What a reward model takes is not predicted: those that are named have it, else the last ones."""

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
    """Those that score completions."""

    @property
    def by_role(self) -> Mapping[RoleName, Devices]:
        """The devices that have a role alone."""
        return {"teacher": self.teachers, "rollout": self.rollouts, "reward": self.rewards}

    @property
    def policy(self) -> Devices:
        """The device of each rank."""
        return self.training.placed.devices


def role_choices(cluster: Cluster, asked: RolesAsked, best: BestPlan) -> list[RoleChoice]:
    """The best plan for each choice of devices for the roles, the fastest first. Device 0, which has the data, trains.

    CapacityError where no choice has room, or a device that is named has none for its role.
    """
    facts, found, why = asked.facts, list[RoleChoice](), "too few machines have room for their models"
    search = _Search(cluster, best)
    rewards = _rewards(cluster, asked.wishes)
    teaches = None if asked.taught is None else teacher_room(cluster, asked.taught.teacher)
    samples = None if facts.sampling is None else rollout_room(cluster, asked.spec, facts)
    for teachers in _sets(cluster, asked.wishes.get("teacher"), teaches, rewards):
        for rollouts in _sets(cluster, asked.wishes.get("rollout"), samples, (*teachers, *rewards)):
            if not set(teachers).isdisjoint(rollouts):
                continue
            try:
                found.append(replace(_choice(asked, search, teachers, rollouts, rewards), rewards=rewards))
            except (CapacityError, PlanError) as error:
                why = error.message
    if not found:
        raise CapacityError(f"no choice of machines for the roles has room: {why}", "give more or larger machines")
    return sorted(found, key=lambda choice: choice.seconds)


def _rewards(cluster: Cluster, wishes: Mapping[RoleName, RoleWish]) -> Devices:
    """The devices that score: those that are named, else the last that are named for nothing else."""
    wish = wishes.get("reward")
    if wish is None or wish.devices is not None:
        return () if wish is None else wish.devices or ()
    named = {device for other in wishes.values() for device in other.devices or ()}
    free = [device for device in range(1, len(cluster)) if device not in named]
    return tuple(free[len(free) - (wish.count or 0) :])


def _sets(cluster: Cluster, wish: RoleWish | None, room: Room | None, taken: Devices) -> Iterator[Devices]:
    """Sets of devices that may have a role; of devices that are alike the last ones, as the first are nearer to the
    data. CapacityError where one that is named has no room."""
    if wish is None or room is None:
        yield ()
        return
    if wish.devices is not None:
        for device in wish.devices:
            room.check(device)
        yield wish.devices
        return
    able = [device for device in range(1, len(cluster)) if device not in taken and room.is_there(device)]
    sizes = range(len(able) + 1) if wish.count is None else range(wish.count, min(wish.count, len(able)) + 1)
    if 0 in sizes:
        yield ()
    if len(able) > MOST_DEVICES:
        by_speed = sorted(able, key=room.seconds)
        for count in filter(None, sizes):
            yield from dict.fromkeys((tuple(sorted(by_speed[:count])), tuple(sorted(by_speed[-count:]))))
        return
    kinds = kinds_of(cluster, able)
    for counts in counts_upto(tuple(map(len, kinds)), len(able)):
        if sum(counts) in sizes:
            yield tuple(sorted(d for kind, count in zip(kinds, counts, strict=True) for d in kind[len(kind) - count :]))


class _Search:
    """Best plans on what is left of a cluster, each searched for once, whoever of the others has which role."""

    def __init__(self, cluster: Cluster, best: BestPlan) -> None:
        self.cluster, self._best = cluster, best
        self._known: dict[tuple[Devices, bool, bool], TrainingChoice | CapacityError | PlanError] = {}

    def on(self, devices: Devices, facts: TrainingFacts) -> TrainingChoice:
        """The best plan, whose devices are numbered as in the whole cluster."""
        key = devices, facts.teacher is None, facts.sampling is None
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
    own = replace(facts, teacher=None if teachers else facts.teacher, sampling=None if rollouts else sampling)
    training = search.on(trains, own)
    if rollouts:
        assert sampling is not None, "it was asked for"
        placed = training.placed
        placed = replace(placed, facts=replace(placed.facts, sampling=replace(sampling, servers=rollouts)))
        training = replace(training, placed=placed, predicted=placed.predict())
    predicted = training.predicted
    if not teachers or taught is None:
        teaching = dict(predicted.roles).get("teacher", 0.0)
        return RoleChoice(teachers, rollouts, training, teaching, predicted.seconds)
    teaching = teaching_seconds(cluster, taught, teachers, training.placed.devices[0])
    roles = sum(seconds for _, seconds in predicted.roles)
    apart = max(predicted.policy, teaching)
    seconds = roles + taught.lmbda * (predicted.policy + teaching) + (1 - taught.lmbda) * apart
    return RoleChoice(teachers, rollouts, training, teaching, seconds)
