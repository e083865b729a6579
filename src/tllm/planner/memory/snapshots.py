"""What copies of steps and saves take. Copies as `train.snapshot.placement` deals them: memory, and bytes that go to
a mirror.

Of each element of weights and states two ranks keep a copy, each of the last two steps. What several ranks hold two of
them copy, and nothing is sent; what one rank alone holds it copies and sends.

    zero 0      all is held by n ranks      alone 0                 copied 2 / n of all
    zero 1, 2   the weights are             alone the states' 1 / n
    zero 3      nothing is                  alone 1 / n of all
    n = 1       nothing is                  alone all

What each replica has of its own (a residual, the states of local steps) one rank holds alone under any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from tllm.planner.cost.buckets import shares_table
from tllm.planner.cost.rank_work import RankWork, TrainingFacts
from tllm.spec.cut import Range, size
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

VERSIONS = 2


def replicated_bytes(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> int:
    """Bytes of one copy that nobody else can make."""
    return _standing(spec, plan, facts, work)[0] if _is_mirrored(plan, facts) and plan.world_size > 1 else 0


def snapshot_bytes(spec: ModelSpec, plan: Plan, facts: TrainingFacts, works: Sequence[RankWork]) -> list[int]:
    """Bytes of copies on each of these ranks, those of the rank before it that it mirrors among them."""
    if not _is_mirrored(plan, facts):
        return [0] * len(works)
    own = []
    for work in works:
        alone, shared = _standing(spec, plan, facts, work)
        own.append(alone + 2 * shared // work.replicas)
    came = [replicated_bytes(spec, plan, facts, work) for work in works]
    return [VERSIONS * (mine + came[index - 1]) for index, mine in enumerate(own)]


def save_bytes(spec: ModelSpec, plan: Plan, facts: TrainingFacts, works: Sequence[RankWork]) -> list[int]:
    """Bytes at the most that each of these ranks copies when the run is saved, to write them while training goes on.

    What several ranks hold is dealt to them as `train.checkpoint.shard_assignment` does. With states on a disk the
    copies lie there.
    """
    if plan.servers or plan.offload == "disk":
        return [0] * len(works)
    found = []
    for work in works:
        alone, shared = _standing(spec, plan, facts, work)
        kinds = _kinds(facts) if plan.zero == 0 else (facts.item_bytes,)
        found.append(alone + (max(_dealt(_tensors(spec, work), kinds, (0,) * work.replicas)) if shared else 0))
    both: dict[tuple[int, Range], list[int]] = {}  # places of the two ranks that hold the same rows of a tied table
    for place, work in enumerate(works):
        if work.replicas == 1 and shares_table(spec, plan, work):
            both.setdefault((work.at.replica, work.cut.vocab), []).append(place)
    for places in (some for some in both.values() if len(some) > 1):
        rows = size(works[places[0]].cut.vocab) * spec.hidden_size
        others = tuple(found[place] - rows * sum(_kinds(facts)) for place in places)
        for place, dealt in zip(places, _dealt((rows,), _kinds(facts), others), strict=True):
            found[place] = dealt
    return found


def _kinds(facts: TrainingFacts) -> tuple[int, ...]:
    """Bytes of an element of each state that all holders of a weight have alike, and of the weight."""
    return (*[facts.full_precision_bytes] * _alike(facts), facts.item_bytes)


def _tensors(spec: ModelSpec, work: RankWork) -> tuple[int, ...]:
    """Elements of each, by name: both ends of the model come before its layers."""
    units = work.parameters(spec)
    if work.runs[-1].stop == spec.num_layers:
        units = [units[-1], *units[:-1]]
    return tuple(one.elements for unit in units for one in unit)


@lru_cache(256)
def _dealt(tensors: tuple[int, ...], kinds: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each rank that holds these tensors, each of so many kinds, beside `others`: a kind after the other,
    each tensor to whoever has least so far."""
    ranks = [(size, rank) for rank, size in enumerate(others)]
    heapify(ranks)
    for item in kinds:
        for elements in tensors:
            least, rank = ranks[0]
            heapreplace(ranks, (least + item * elements, rank))
    return tuple(size for size, _ in sorted(ranks, key=lambda one: one[1]))


def _is_mirrored(plan: Plan, facts: TrainingFacts) -> bool:
    return facts.mirror_steps > 0 and not plan.servers


def _standing(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> tuple[int, int]:
    """Bytes of weights and states that this rank alone holds, and that others hold too."""
    elements = sum(one.elements for unit in work.parameters(spec) for one in unit)
    weights = elements * facts.item_bytes
    states = elements * facts.full_precision_bytes * _alike(facts)
    own = elements * facts.full_precision_bytes * (facts.residual + (facts.states if facts.local else 0))
    n = work.replicas
    if n == 1:
        return weights + states + own, 0
    if plan.zero == 0:
        return own, weights + states
    return ((weights + states) // n + own, 0) if plan.zero == 3 else (states // n + own, weights)


def _alike(facts: TrainingFacts) -> int:
    """States of an element that are the same in all replicas."""
    return (
        facts.local
        + facts.late
        + (facts.item_bytes < facts.full_precision_bytes)
        + (0 if facts.local else facts.states)
    )
