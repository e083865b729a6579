"""Bytes that each rank of a plan holds, by exact accounting from the spec and the cut; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from tllm.core.errors import PlanError
from tllm.planner.cost.parameters import run_parameters, size
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds: its place, its cut, bytes of weights, and bytes of keys and values for one token."""

    rank: int
    stage: int
    layers: range
    cut: Cut
    weights: int
    kv_per_token: int


def rank_bytes(spec: ModelSpec, plan: Plan, dtype: str) -> list[RankBytes]:
    """The account of every rank of a plan, weights and cache in `dtype`. Raises PlanError where it cannot be cut."""
    plan.check(spec.num_layers)
    if dtype not in ITEM_BYTES:
        raise PlanError(f"dtype {dtype!r} is not known", "known: " + ", ".join(ITEM_BYTES))
    item = ITEM_BYTES[dtype]
    ranks = []
    for index, stage in enumerate(plan.stages):
        layers = range(stage.start, stage.stop)
        for place, cut in enumerate(cut_stage(spec, stage.shares, plan.experts)):
            values = sum(one.elements for unit in run_parameters(spec, layers, cut) for one in unit)
            kv = 2 * len(layers) * size(cut.kv_heads) * spec.head_dim
            ranks.append(RankBytes(plan.ranks(index)[place], index, layers, cut, values * item, kv * item))
    return ranks
