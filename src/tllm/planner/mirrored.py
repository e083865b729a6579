"""What copies of steps take, as `train.keepers` deals them: memory of each rank, and bytes that go to its mirror.

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

from tllm.planner.ranks import RankWork, TrainingFacts
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan

VERSIONS = 2


def sent_to_mirror(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> int:
    """Bytes of one copy that nobody else can make."""
    return _held(spec, plan, facts, work)[0] if _is_mirrored(plan, facts) and plan.world_size > 1 else 0


def copies_of(spec: ModelSpec, plan: Plan, facts: TrainingFacts, works: Sequence[RankWork]) -> list[int]:
    """Bytes of copies on each of these ranks, those of the rank before it that it mirrors among them."""
    if not _is_mirrored(plan, facts):
        return [0] * len(works)
    own = []
    for work in works:
        alone, shared = _held(spec, plan, facts, work)
        own.append(alone + 2 * shared // work.replicas)
    came = [sent_to_mirror(spec, plan, facts, work) for work in works]
    return [VERSIONS * (mine + came[index - 1]) for index, mine in enumerate(own)]


def _is_mirrored(plan: Plan, facts: TrainingFacts) -> bool:
    return facts.mirror_steps > 0 and not plan.servers


def _held(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> tuple[int, int]:
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
