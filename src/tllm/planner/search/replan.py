"""Plans for the ranks that are left after others were lost.

`replan`: a serving plan on them, in which each keeps its share of the work in proportion to the others.

`training_plans_on`: training plans on them, the one that changes least first. Whole replicas stay as they are. Where
replicas have lost ranks, the ranks that they have left complete as many of them as possible. With fewer ranks than one
replica has, its stages are cut anew. No plan changes the numbers that a run computes.
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
    """The plan on `ranks` alone, in their order. Raises PlanError if no rank is left.

    A stage keeps those of its ranks that are left, with their shares; one without any is gone. Layers go to the stages
    in proportion to what their ranks held of them before, so a rank that was given little is still given little. Where
    a grid has lost a rank, weights are cut one way.
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
    is_grid = all(len(places) == stage.tp for places, stage in zip(kept, plan.stages, strict=True) if places)
    tensor = plan.tensor if is_grid and any(len(shares) > 1 for _, shares in stages) else "1d"
    return Plan(tuple(runs), plan.experts, tensor)


def training_plans_on(plan: Plan, ranks: Collection[int]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Plans to try, each with the ranks of `plan` that become its ranks, in order; some may be left over."""
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
    """The plan with `count` of its replicas, whole ones first; a completed one keeps the share of the replica it
    was."""
    size = plan.replica_size
    ranks_of: list[set[int]] = [set() for _ in range(plan.replicas)]
    for rank in left:
        ranks_of[rank // size].add(rank)
    kept = sorted(sorted(range(plan.replicas), key=lambda replica: (-len(ranks_of[replica]), replica))[:count])
    whole = set(kept)
    spare = (rank for rank in left if rank // size not in whole)
    taken = [
        rank if rank in ranks_of[replica] else next(spare)
        for replica in kept
        for rank in range(replica * size, (replica + 1) * size)
    ]
    shares = tuple(plan.dp[replica] for replica in kept) if count > 1 else (1,)
    ep = plan.ep if count % plan.ep == 0 else 1
    return msgspec.structs.replace(plan, dp=shares, ep=ep), tuple(taken)


def _smaller(plan: Plan, left: Sequence[int]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """One replica on fewer ranks than it had: its stages as `replan` cuts them; or one rank alone."""
    places = _places(plan, left)
    cut = replan(_one_replica(plan), list(places))
    same = dict(recompute=plan.recompute, offload=plan.offload)
    schedule = plan.schedule if plan.chunks == 1 else "1f1b"
    sequence = plan.sequence and len({stage.tp for stage in cut.stages}) == 1
    yield msgspec.structs.replace(cut, schedule=schedule, sequence=sequence, **same), tuple(places.values())
    alone = Plan((Stage(0, plan.stages[-1].stop),), plan.experts)
    yield msgspec.structs.replace(alone, **same), (left[0],)


def _one_replica(plan: Plan) -> Plan:
    """One replica without context parallelism, each of its stages with a single run of layers."""
    layers = [sum(stage.stop - stage.start for stage in plan.stages[place :: plan.pp]) for place in range(plan.pp)]
    bounds = pairwise(accumulate(layers, initial=0))
    stages = zip(bounds, plan.stages[: plan.pp], strict=True)
    return Plan(tuple(Stage(start, stop, stage.shares) for (start, stop), stage in stages), plan.experts)


def _places(plan: Plan, left: Sequence[int]) -> dict[int, int]:
    """For each rank of `_one_replica` that can be filled, the rank of `plan` that becomes it: one that had the same
    place if there is one, else any other."""
    replica, filled, others = _one_replica(plan), dict[int, int](), list[int]()
    for rank in left:
        at = plan.coordinates(rank)
        place = replica.rank_of(Coordinates(0, at.stage, 0, at.tp))
        if place in filled:
            others.append(rank)
        else:
            filled[place] = rank
    empty = [place for place in range(replica.world_size) if place not in filled]
    return dict(sorted({**filled, **dict(zip(empty, others, strict=False))}.items()))


def _served(plan: Plan, left: Sequence[int]) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """A plan with parameter servers, whose replicas have one rank each: those replicas and servers that are left."""
    replicas = [rank for rank in left if rank < plan.replicas]
    servers = len(left) - len(replicas)
    if replicas and servers:
        shares = tuple(plan.dp[rank] for rank in replicas) if len(replicas) > 1 else (1,)
        yield msgspec.structs.replace(plan, dp=shares, servers=servers), tuple(left)
