"""Which ranks work together under a plan, axis by axis, and the wires that this takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from functools import lru_cache
from itertools import pairwise, product
from typing import Literal

from tllm.spec.plan import Plan, Wire

PIPELINE, SERVERS, DATA = "pp", "servers", "data"
GROUPS = ("tp", "cp", "dp", "ep", "edp", "replica", "world", "save")

RoleName = Literal["teacher", "rollout", "reward"]
"""What a node does for a training run beside its plan: it answers what rank 0 asks."""


def computing(plan: Plan) -> range:
    """The ranks of the replicas."""
    return range(plan.replicas * plan.replica_size)


def server_ranks(plan: Plan) -> range:
    """The ranks of the parameter servers, which come after those of the replicas."""
    return range(computing(plan).stop, plan.world_size)


@lru_cache(16)
def snapshot_holders(hosts: tuple[Hashable, ...]) -> tuple[int, ...]:
    """For each rank the one that keeps the snapshots which it sends: of another machine, or the next rank where all are
    on one. `hosts` are the machines of all ranks; a machine's ranks take turns over those of others, from the next
    one on."""
    ranks_of, holders = defaultdict[Hashable, list[int]](list), list[int]()
    for rank, host in enumerate(hosts):
        ranks_of[host].append(rank)
    turns = {rank: turn for ranks in ranks_of.values() for turn, rank in enumerate(ranks)}
    for rank, host in enumerate(hosts):
        own, turn, distance = ranks_of[host], turns[rank], 1
        if len(own) < len(hosts):
            distance += turn % (len(hosts) - len(own))
            for other in (*own[turn + 1 :], *own[:turn]):
                distance += (other - rank) % len(hosts) <= distance
        holders.append((rank + distance) % len(hosts))
    return tuple(holders)


def members(plan: Plan, rank: int) -> dict[str, list[int]]:
    """The global ranks of each group that a rank is in, by the group's name and in the group's order."""
    names = GROUPS if rank in computing(plan) else ("save",)
    return {name: group(plan, rank, name) for name in names}


def group(plan: Plan, rank: int, name: str) -> list[int]:
    """The global ranks of one group of a rank, in the group's order.

    `tp` and `cp` lie in a stage. `dp` are all that hold the same elements of ordinary parameters, `ep` those that
    spread whole experts among them, `edp` all that hold the same experts. `replica` is one whole model (of one place
    on cp), `world` all replicas. `save` are all ranks, for the thread that writes; servers are in no other group.
    """
    if name in ("world", "save"):
        return list(computing(plan) if name == "world" else range(plan.world_size))
    at, places = plan.coordinates(rank), range(plan.cp)
    if name == "tp":
        coordinates = [at._replace(tp=tp) for tp in range(plan.stages[at.stage].tp)]
    elif name == "cp":
        coordinates = [at._replace(cp=cp) for cp in places]
    elif name == "dp":
        coordinates = [at._replace(replica=r, cp=cp) for r, cp in product(range(plan.replicas), places)]
    elif name == "ep":
        first = at.replica // plan.ep * plan.ep
        coordinates = [at._replace(replica=r) for r in range(first, first + plan.ep)]
    elif name == "edp":
        replicas = range(at.replica % plan.ep, plan.replicas, plan.ep)
        coordinates = [at._replace(replica=r, cp=cp) for r, cp in product(replicas, places)]
    else:
        assert name == "replica", name
        coordinates = [
            at._replace(stage=stage, tp=tp) for stage in range(plan.pp) for tp in range(plan.stages[stage].tp)
        ]
    return [plan.rank_of(member) for member in coordinates]


def wires(plan: Plan) -> list[Wire]:
    """Every directed wire of a training plan: between all members of each group, along each pipeline, to servers, and
    from rank 0, which reads the data, to the others that compute."""
    wanted: dict[Wire, None] = {}
    for rank in range(plan.world_size):
        for name, group in members(plan, rank).items():
            wanted.update(dict.fromkeys(Wire(rank, other, name) for other in group if other != rank))
    for rank in computing(plan):
        wanted.update(dict.fromkeys(_pipeline(plan, rank)))
        wanted.update({Wire(0, rank, DATA): None} if rank else {})
    for rank, server in product(computing(plan), range(len(computing(plan)), plan.world_size)):
        wanted[Wire(rank, server, SERVERS)] = wanted[Wire(server, rank, SERVERS)] = None
    return list(wanted)


def source(place: int, tp_there: int) -> int:
    """Whose result a rank at `place` in its stage takes, of another stage's `tp_there` ranks: all have the same."""
    return place % tp_there


def targets(place: int, tp_here: int, tp_there: int) -> list[int]:
    """Whom a rank at `place` in a stage of `tp_here` ranks sends its result to: those that `source` leads to it."""
    return [other for other in range(tp_there) if source(other, tp_here) == place]


def neighbours(plan: Plan) -> list[tuple[int, int]]:
    """(stage, stage) that follow one another in the model's order, each once; several runs a stage close a ring."""
    order = [run % plan.pp for run in range(len(plan.stages))]
    return list(dict.fromkeys((a, b) for a, b in pairwise(order) if a != b))


def _pipeline(plan: Plan, rank: int) -> list[Wire]:
    """Where a rank sends activations to, and gradients back."""
    at = plan.coordinates(rank)
    both = [pair for a, b in neighbours(plan) for pair in ((a, b), (b, a))]
    return [
        Wire(rank, plan.rank_of(at._replace(stage=there, tp=tp)), PIPELINE)
        for here, there in dict.fromkeys(both)
        if here == at.stage
        for tp in targets(at.tp, plan.stages[here].tp, plan.stages[there].tp)
    ]
