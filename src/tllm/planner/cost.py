"""Bytes that each rank of a plan holds, by exact accounting from the spec and the cut; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from tllm.ground.errors import PlanError
from tllm.spec.cut import Cut, Range, cut_stage
from tllm.spec.model import LayerSpec, ModelSpec
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
            values = sum(_layer_values(spec, spec.layers[i], cut) for i in layers) + _end_values(spec, layers, cut)
            kv = 2 * len(layers) * _size(cut.kv_heads) * spec.head_dim
            ranks.append(RankBytes(plan.ranks(index)[place], index, layers, cut, values * item, kv * item))
    return ranks


def _layer_values(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> int:
    D, H = spec.hidden_size, spec.head_dim
    heads, kv = _size(cut.heads) * H, _size(cut.kv_heads) * H
    attention = D * (heads + 2 * kv) + heads * D
    attention += (heads + 2 * kv) * spec.attention_bias + D * spec.output_bias
    attention += {"none": 0, "head": 2 * H, "full": heads + kv}[spec.qk_norm]
    norms = D * (4 if spec.norm_order == "both" else 2)
    return attention + norms + _mlp_values(spec, layer, cut)


def _mlp_values(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> int:
    D, moe = spec.hidden_size, layer.moe
    if moe is None:
        width = _size(cut.width)
        return 3 * D * width + (2 * width + D) * spec.mlp_bias
    experts = _size(cut.experts) * 3 * D * _size(cut.expert_width)
    shared = 3 * D * _size(cut.shared_width) + D if moe.shared_width else 0
    return D * moe.num_experts + experts + shared


def _end_values(spec: ModelSpec, layers: range, cut: Cut) -> int:
    """Embedding on the first stage; final norm and output table on the last, unless it is tied and already held."""
    table = _size(cut.vocab) * spec.hidden_size
    first, last = layers.start == 0, layers.stop == spec.num_layers
    head = last * (spec.hidden_size + (0 if spec.tied and first else table))
    return first * table + head


def _size(held: Range) -> int:
    return held[1] - held[0]
