"""Bytes of in-memory snapshots of the training state, and of the copies that a checkpoint is saved from.

Two ranks keep a snapshot of each element of weights and optimizer states, each of the last two steps
(`training.snapshot.placement`). What ranks of several machines hold, two of them copy, and nothing is sent. What one
rank, or one machine, holds alone is copied once and sent to a rank of another machine, if there are several. Over n
ranks that share their gradients, each on a machine of its own:

    zero 0      all n ranks hold everything       alone: nothing                copied: 2 / n of everything
    zero 1, 2   all n ranks hold the weights      alone: 1 / n of the states
    zero 3      nothing is held twice             alone: 1 / n of everything
    n = 1       nothing is held twice             alone: everything

Of whole experts that are divided over replicas (`ep`) n is as many ranks as have the same ones. What belongs to one
replica (a residual, the states of local steps) one rank holds alone under any plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain
from typing import NamedTuple

from tllm.planner.cost.buckets import shares_table
from tllm.planner.cost.rank_work import RankWork, TrainingFacts, rank_works
from tllm.spec.cut import Range, size
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import group, snapshot_holders

VERSIONS = 2
"""Steps of which snapshots are kept."""


class RankSnapshots(NamedTuple):
    """Bytes of one snapshot: what a rank copies of its own, of which it sends what it was `sent` for, and what others
    send to it."""

    copied: int
    sent: int
    received: int

    @property
    def kept(self) -> int:
        """Bytes of all steps of which snapshots are kept."""
        return VERSIONS * (self.copied + self.received)


NO_SNAPSHOTS = RankSnapshots(0, 0, 0)


@lru_cache(16)
def rank_snapshots(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, hosts: tuple[str, ...] = ()
) -> tuple[RankSnapshots, ...]:
    """Of every rank of a plan, on the machines `hosts`; each on its own where these are not known."""
    if not _is_replicated(plan, facts):
        return (NO_SNAPSHOTS,) * plan.world_size
    hosts = hosts or tuple(map(str, range(plan.world_size)))
    held = [
        [
            (name, one.ranks, *one.state_bytes(plan, facts))
            for name, one in zip(("dp", "edp"), _held(spec, work), strict=True)
        ]
        for work in rank_works(spec, plan, facts, range(plan.ep))
    ]
    copied, sent, received = ([0] * plan.world_size for _ in range(3))
    on_hosts = _HoldersByHost(plan, hosts)
    for rank, holder in enumerate(snapshot_holders(hosts)):
        for name, ranks, alone, shared in held[rank % len(held)]:
            part, is_sent = on_hosts.part_of(rank, name, ranks) if shared else (0.0, False)
            copied[rank] += alone + int(part * shared)
            sent[rank] += (alone + is_sent * int(part * shared)) * (plan.world_size > 1)
        received[holder] += sent[rank]
    return tuple(map(RankSnapshots, copied, sent, received))


class _HoldersByHost:
    """Which part of what ranks of a group all have each of them copies, by the machines that they are on."""

    def __init__(self, plan: Plan, hosts: Sequence[str]) -> None:
        self._plan, self._hosts = plan, hosts
        self._are_alike = len(set(hosts)) in (1, len(hosts))
        self._known: dict[tuple[object, ...], tuple[str, int]] = {}

    def part_of(self, rank: int, name: str, ranks: int) -> tuple[float, bool]:
        """The part that one of so many ranks copies, and whether it sends that, as no rank of another machine has the
        same.

        Two ranks copy each element, of two machines if there are several. One that has more than half of the ranks has
        one copy of all, and the others have the second.
        """
        if self._are_alike:
            return 2 / ranks, False
        at = self._plan.coordinates(rank)
        key = (name, at.stage, at.tp, at.replica % self._plan.ep if name == "edp" else 0)
        if key not in self._known:
            of_host = Counter(self._hosts[member] for member in group(self._plan, rank, name))
            self._known[key] = of_host.most_common(1)[0]
        most, count = self._known[key]
        if 2 * count <= ranks:
            return 2 / ranks, False
        return 1 / (count if self._hosts[rank] == most else ranks - count), count == ranks


def save_bytes(spec: ModelSpec, plan: Plan, facts: TrainingFacts, works: Sequence[RankWork]) -> list[int]:
    """Bytes at most that each of these ranks copies when the run is saved, to write them while training goes on.

    What several ranks hold is assigned to one of them, as by `training.checkpoint.shard_assignment`. With states on a
    disk the copies lie there too.
    """
    if plan.servers or plan.offload == "disk":
        return [0] * len(works)
    copied = []
    kinds = _item_bytes_of_kinds(facts) if plan.zero == 0 else (facts.learned_bytes,)
    for work in works:
        copied.append(0)
        for held in _held(spec, work):
            alone, shared = held.state_bytes(plan, facts)
            copied[-1] += alone + (max(_assigned(held.tensors, kinds, (0,) * held.ranks)) if shared else 0)
    holders: dict[tuple[int, Range], list[int]] = {}  # indices of the ranks that hold the same rows of a tied table
    for index, work in enumerate(works):
        if work.replicas == 1 and shares_table(spec, plan, work):
            holders.setdefault((work.at.replica, work.cut.vocab), []).append(index)
    for indices in (pair for pair in holders.values() if len(pair) > 1):
        rows, kinds = size(works[indices[0]].cut.vocab) * spec.hidden_size, _item_bytes_of_kinds(facts)
        before = tuple(copied[index] - rows * sum(kinds) for index in indices)
        for index, total in zip(indices, _assigned((rows,), kinds, before), strict=True):
            copied[index] = total
    return copied


def _item_bytes_of_kinds(facts: TrainingFacts) -> tuple[int, ...]:
    """Bytes of one element of each state that all holders of a weight have alike, and of the weight itself."""
    return (*[facts.full_precision_bytes] * _shared_states(facts), facts.learned_bytes)


class _Held(NamedTuple):
    """Elements of each parameter that so many `ranks` have alike, in the order of names."""

    tensors: tuple[int, ...]
    ranks: int

    def state_bytes(self, plan: Plan, facts: TrainingFacts) -> tuple[int, int]:
        """Bytes of weights and states that each of them alone holds, and that the others hold too."""
        elements, n = sum(self.tensors), self.ranks
        weights = elements * facts.learned_bytes
        states = elements * facts.full_precision_bytes * _shared_states(facts)
        own = elements * facts.full_precision_bytes * (facts.residual + (facts.states if facts.local else 0))
        if n == 1:
            return weights + states + own, 0
        if plan.zero == 0:
            return own, weights + states
        return ((weights + states) // n + own, 0) if plan.zero == 3 else (states // n + own, weights)


def _held(spec: ModelSpec, work: RankWork) -> tuple[_Held, _Held]:
    """What a rank has as all replicas have it, and of experts that are divided over replicas. Both ends of the model
    come before its layers."""
    units = work.learned(spec)
    if work.adapter is None and work.ends_model(spec):
        units = [units[-1], *units[:-1]]
    parameters = list(chain.from_iterable(units))
    ordinary, spread = (
        tuple(one.elements for one in parameters if one.spread == is_spread) for is_spread in (False, True)
    )
    return _Held(ordinary, work.replicas), _Held(spread, work.expert_replicas)


@lru_cache(256)
def _assigned(tensors: tuple[int, ...], kinds: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes that each rank has to copy after these tensors were assigned, starting from the bytes `before`.

    Kind after kind, each tensor goes to the rank that has least so far. `kinds`: bytes of an element of each kind.
    """
    ranks = [(size, rank) for rank, size in enumerate(before)]
    heapify(ranks)
    for item in kinds:
        for elements in tensors:
            least, rank = ranks[0]
            heapreplace(ranks, (least + item * elements, rank))
    return tuple(size for size, _ in sorted(ranks, key=lambda assigned: assigned[1]))


def _is_replicated(plan: Plan, facts: TrainingFacts) -> bool:
    return facts.mirror_steps > 0 and not plan.servers


def _shared_states(facts: TrainingFacts) -> int:
    """How many states of an element are the same in all replicas."""
    return facts.local + facts.late + facts.float32_weights + (0 if facts.local else facts.states)
