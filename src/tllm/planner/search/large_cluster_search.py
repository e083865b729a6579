"""A training plan for a cluster of many devices: the fastest even plan over all axes that fits.

Tensor-parallel ranks are on one node. Plans are tried in the order of a lower bound on their step,

    seconds of a step's products on all devices x (1 + (pp - 1) / (chunks x microbatches of a replica)),

whose last term is the bubble of an interleaved 1F1B schedule (Narayanan et al., 2104.04473, section 2.2). Each plan
that fits is simulated, with every ZeRO stage and as little recomputation as fits with it. The first PLAYED of them
count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tllm.core.errors import CapacityError, PlanError, counted
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

PLAYED = 12
"""Choices of axes that are simulated."""

CHUNKS = (1, 2, 4)
STAGES = tuple(2**i for i in range(8))


class _EvenPlan(NamedTuple):
    """One choice of axes, and the factor by which a step takes longer than its products alone, at least."""

    lower_bound: float
    plan: Plan


def best_even_plan(
    spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, products: str | None = None, played: int = PLAYED
) -> PlacedPlan:
    """The fastest even plan. Raises CapacityError where none fits, PlanError where there are too few rows for any."""
    candidates = sorted(_plans(spec, cluster, facts), key=lambda even: even.lower_bound)
    if not candidates:
        raise PlanError(
            f"{counted(facts.microbatches, 'microbatch is', 'microbatches are')} too few for {len(cluster)} devices",
            "give a larger batch, or a cluster of fewer nodes",
        )
    best: tuple[float, PlacedPlan] | None = None
    tightest = math.inf
    for _, plan in candidates:
        fitting, need = _that_fit(spec, plan, facts, cluster, products)
        tightest = min(tightest, need)
        if not fitting:
            continue
        for placed in fitting:
            seconds = placed.predict().seconds
            if best is None or seconds < best[0]:
                best = (seconds, placed)
        played -= 1
        if not played:
            break
    if best is None:
        has = min(device.memory for device in cluster.devices)
        raise CapacityError(
            f"no even plan fits: the one that needs least takes {tightest / 2**30:.2f} GiB on a rank, and a device has "
            f"{has / 2**30:.2f} GiB",
            "give more or larger nodes, a smaller dtype or shorter rows",
        )
    return best[1]


def _plans(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> Iterator[_EvenPlan]:
    each = min(Counter(cluster.node_of).values())
    for tp in (2**i for i in range(each.bit_length()) if each % 2**i == 0):
        for pp in (pp for pp in STAGES if pp <= spec.num_layers and pp * tp <= len(cluster)):
            for chunks in (v for v in CHUNKS if v == 1 or (pp > 1 and pp * v <= spec.num_layers)):
                yield from _even(spec, facts, len(cluster), tp, pp, chunks)


def _even(spec: ModelSpec, facts: TrainingFacts, devices: int, tp: int, pp: int, chunks: int) -> Iterator[_EvenPlan]:
    cp = 1
    while devices // (tp * pp * cp) > facts.microbatches:
        cp *= 2
    dp = devices // (tp * pp * cp)
    if dp < 1 or cp > (1 if spec.delta else facts.most_ranks_of_row):
        return
    microbatches = -(-facts.microbatches // dp)
    text = f"pp={pp},tp={tp},cp={cp},dp={dp},chunks={chunks}" + (",sequence=true" if tp > 1 else "")
    experts = next((layer.moe.num_experts for layer in spec.layers if layer.moe), 1)
    ep = max(n for n in range(1, min(dp, experts) + 1) if dp % n == 0 and experts % n == 0)
    for spread in {1, ep}:
        plan = Plan.parse(text + (f",ep={spread}" if spread > 1 else ""), spec.num_layers)
        yield _EvenPlan(1 + (pp - 1) / (chunks * microbatches), plan)


def _that_fit(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, cluster: Cluster, products: str | None
) -> tuple[list[PlacedPlan], float]:
    """The plan with each ZeRO stage and the least recomputation that fits with it; and the least bytes of its fullest
    rank. With more memory none of them recomputes more, so that the fastest of them is never slower."""
    fitting, least, devices = list[PlacedPlan](), math.inf, tuple(range(plan.world_size))
    zeros = (1, 2, 3) if plan.pp == 1 else (1, 2)
    for zero in zeros if plan.replicas * plan.cp > 1 else (0,):
        for recompute in ("none", "selective", "layer"):
            candidate = msgspec.structs.replace(plan, recompute=recompute, zero=zero)
            placed = PlacedPlan(spec, candidate, facts, cluster, devices, products, cluster.execution)
            try:
                memory = placed.memory([0])
            except PlanError:
                return [], least  # too little to cut
            least = min(least, max(rank.total for rank in memory))
            if placed.fits(memory):
                fitting.append(placed)
                break
    return fitting, least
