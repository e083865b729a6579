"""`replan`: a serving plan on those of its ranks that are left, each keeping its part of the work to that of others."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from math import lcm

from tllm.ground.errors import PlanError
from tllm.spec.cut import proportional
from tllm.spec.plan import Plan, Stage


def replan(plan: Plan, ranks: Collection[int]) -> Plan:
    """The plan on `ranks` alone, in their order. PlanError if there is none.

    A stage keeps those of its ranks that are left, with their shares; one without any is gone. Layers go to the stages
    in proportion to what their ranks held of them before, so a rank that was given little is still given little.
    """
    plan.check_serving()
    assert set(ranks) <= set(range(plan.world_size)), "only ranks of the plan can be left of it"
    kept = [[place for place, rank in enumerate(plan.ranks(i)) if rank in ranks] for i in range(plan.pp)]
    stages = [
        (stage, tuple(stage.shares[place] for place in places))
        for stage, places in zip(plan.stages, kept, strict=True)
        if places
    ]
    if not stages:
        raise PlanError(f"no rank is left of plan {plan}", "let a node join")
    held = [Fraction(sum(shares) * (stage.stop - stage.start), sum(stage.shares)) for stage, shares in stages]
    scale = lcm(*(layers.denominator for layers in held))
    bounds = proportional(plan.stages[-1].stop, tuple(int(layers * scale) for layers in held), "layers")
    runs = (Stage(start, stop, shares) for (start, stop), (_, shares) in zip(bounds, stages, strict=True))
    return Plan(tuple(runs), plan.experts)
