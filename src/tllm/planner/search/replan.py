"""`replan`: a serving plan on those of its ranks that are left, each keeping its part of the work to that of others.

`training_plans_on`: training plans on those of a plan's ranks that are left, the one that changes least first.

Whole replicas stay as they are; where some have lost ranks, their others fill each other's places, as long as a replica
comes of it. With fewer ranks than one replica has, its stages are cut anew. No plan changes a number of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

import msgspec

from tllm.core.errors import PlanError
from tllm.spec.cut import proportional
from tllm.spec.plan import Coordinates, Plan, Stage


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


def training_plans_on(plan: Plan, ranks: Collection[int]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Plans to try, each with the ranks of `plan` that take its own, in order; a rank may be left over."""
    assert set(ranks) <= set(range(plan.world_size)), "only ranks of the plan can be left of it"
    left = sorted(ranks)
    if len(left) == plan.world_size:
        yield plan, tuple(left)
        return
    if plan.servers:
        yield from _served(plan, left)
        return
    for count in range(len(left) // plan.replica_size, 0, -1):
        yield _replicas(plan, left, count)
    if left:
        yield from _smaller(plan, left)


def _replicas(plan: Plan, left: Sequence[int], count: int) -> tuple[Plan, tuple[int, ...]]:
    """So many replicas as the plan has, made of whole ones first. A mended one has the share of the place it takes."""
    size = plan.replica_size
    of = [[rank for rank in left if rank // size == replica] for replica in range(plan.replicas)]
    kept = sorted(sorted(range(plan.replicas), key=lambda replica: (-len(of[replica]), replica))[:count])
    spare = [rank for replica in range(plan.replicas) if replica not in kept for rank in of[replica]]
    taken: list[int] = []
    for replica in kept:
        for rank in range(replica * size, (replica + 1) * size):
            taken.append(rank if rank in of[replica] else spare.pop(0))
    shares = tuple(plan.dp[replica] for replica in kept) if count > 1 else (1,)
    ep = plan.ep if count % plan.ep == 0 else 1
    return msgspec.structs.replace(plan, dp=shares, ep=ep), tuple(taken)


def _smaller(plan: Plan, left: Sequence[int]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """One replica on fewer ranks than it had: its stages as `replan` cuts them, or else one rank alone."""
    places = _places(plan, left)
    cut = replan(_bare(plan), list(places))
    same = dict(recompute=plan.recompute, offload=plan.offload)
    schedule = plan.schedule if plan.chunks == 1 else "1f1b"
    sequence = plan.sequence and len({stage.tp for stage in cut.stages}) == 1
    yield msgspec.structs.replace(cut, schedule=schedule, sequence=sequence, **same), tuple(places.values())
    alone = Plan((Stage(0, plan.stages[-1].stop),), plan.experts)
    yield msgspec.structs.replace(alone, **same), (left[0],)


def _bare(plan: Plan) -> Plan:
    """A replica without cp, each of its stages in one run of layers."""
    layers = [sum(stage.stop - stage.start for stage in plan.stages[place :: plan.pp]) for place in range(plan.pp)]
    bounds = pairwise(accumulate(layers, initial=0))
    stages = zip(bounds, plan.stages[: plan.pp], strict=True)
    return Plan(tuple(Stage(start, stop, stage.shares) for (start, stop), stage in stages), plan.experts)


def _places(plan: Plan, left: Sequence[int]) -> dict[int, int]:
    """The rank at each place of `_bare` that can be filled: one that stood there if there is one, else any other."""
    bare, found, others = _bare(plan), dict[int, int](), list[int]()
    for rank in left:
        at = plan.coordinates(rank)
        place = bare.rank_of(Coordinates(0, at.stage, 0, at.tp))
        if place in found:
            others.append(rank)
        else:
            found[place] = rank
    empty = [place for place in range(bare.world_size) if place not in found]
    return dict(sorted({**found, **dict(zip(empty, others, strict=False))}.items()))


def _served(plan: Plan, left: Sequence[int]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Replicas of one rank each and servers, those of either that are left."""
    replicas = [rank for rank in left if rank < plan.replicas]
    servers = len(left) - len(replicas)
    if replicas and servers:
        shares = tuple(plan.dp[rank] for rank in replicas) if len(replicas) > 1 else (1,)
        yield msgspec.structs.replace(plan, dp=shares, servers=servers), tuple(left)
