"""What copies of steps and saves take. Copies as `train.keepers` deals them: memory, and bytes that go to a mirror.

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

from tllm.planner.buckets import shares_table
from tllm.planner.parameters import size
from tllm.planner.ranks import RankWork, TrainingFacts
from tllm.spec.cut import Range
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan

VERSIONS = 2


def sent_to_mirror(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> int:
    """Bytes of one copy that nobody else can make."""
    return _standing(spec, plan, facts, work)[0] if _is_mirrored(plan, facts) and plan.world_size > 1 else 0


def copies_of(spec: ModelSpec, plan: Plan, facts: TrainingFacts, works: Sequence[RankWork]) -> list[int]:
    """Bytes of copies on each of these ranks, those of the rank before it that it mirrors among them."""
    if not _is_mirrored(plan, facts):
        return [0] * len(works)
    own = []
    for work in works:
        alone, shared = _standing(spec, plan, facts, work)
        own.append(alone + 2 * shared // work.replicas)
    came = [sent_to_mirror(spec, plan, facts, work) for work in works]
    return [VERSIONS * (mine + came[index - 1]) for index, mine in enumerate(own)]


def saved_of(spec: ModelSpec, plan: Plan, facts: TrainingFacts, works: Sequence[RankWork]) -> list[int]:
    """Bytes at the most that each of these ranks copies when the run is saved, to write them while training goes on.

    Each tensor, and each state of it, is written by one of those that hold it, by the one with the least to write so
    far: two that hold much alike differ by no more than the largest. With states on a disk the copies lie there.
    """
    if plan.servers or plan.offload == "disk":
        return [0] * len(works)
    standing = [_standing(spec, plan, facts, work) for work in works]
    ends = {work.rank for work in works if work.replicas == 1 and shares_table(spec, plan, work)}
    both: dict[tuple[int, Range], int] = {}  # bytes of the two ranks that hold the same rows of a tied table
    for work, (alone, _) in zip(works, standing, strict=True):
        if work.rank in ends:
            both[_rows(work)] = both.get(_rows(work), 0) + alone
    found = []
    for work, (alone, shared) in zip(works, standing, strict=True):
        elements = [one.elements for unit in work.parameters(spec) for one in unit]
        largest, n = max(elements) * facts.wide, work.replicas
        if work.rank in ends and both[_rows(work)] > alone:
            table = alone * size(work.cut.vocab) * spec.hidden_size // sum(elements)
            alone = min(alone, max(alone - table, (both[_rows(work)] - table + largest) // 2))
        found.append(alone + min(shared, (shared + (n - 1) * largest) // n))
    return found


def _rows(work: RankWork) -> tuple[int, Range]:
    """Of its replica's table, at an end of the pipeline."""
    return work.at.replica, work.cut.vocab


def _is_mirrored(plan: Plan, facts: TrainingFacts) -> bool:
    return facts.mirror_steps > 0 and not plan.servers


def _standing(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> tuple[int, int]:
    """Bytes of weights and states that this rank alone holds, and that others hold too."""
    elements = sum(one.elements for unit in work.parameters(spec) for one in unit)
    weights = elements * facts.item
    alike = facts.local + facts.late + (facts.item < facts.wide) + (0 if facts.local else facts.states)
    states = elements * facts.wide * alike
    own = elements * facts.wide * (facts.residual + (facts.states if facts.local else 0))
    n = work.replicas
    if n == 1:
        return weights + states + own, 0
    if plan.zero == 0:
        return own, weights + states
    return ((weights + states) // n + own, 0) if plan.zero == 3 else (states // n + own, weights)
