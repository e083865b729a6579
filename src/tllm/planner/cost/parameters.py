"""How large each parameter of a rank is, unit by unit, from the spec and the cut; no weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tllm.spec.cut import Cut, Range
from tllm.spec.model_spec import LayerSpec, ModelSpec


class Parameter(NamedTuple):
    """`elements` on this rank. `spread`: of whole experts, of which other replicas hold others."""

    elements: int
    spread: bool = False


def layer_parameters(spec: ModelSpec, layer: LayerSpec, cut: Cut, replica: int = 0) -> list[Parameter]:
    """Of one layer. `replica` tells which of the experts spread over replicas are here."""
    D, H = spec.hidden_size, spec.head_dim
    heads, kv = size(cut.heads) * H, size(cut.kv_heads) * H
    qk_norms = {"none": [], "head": [H, H], "full": [heads, kv]}[spec.qk_norm]
    norms = [D] * (4 if spec.norm_order == "both" else 2)
    qkv = [D * (heads + 2 * kv), *([heads + 2 * kv] if spec.attention_bias else [])]
    out = [heads * D, *([D] if spec.output_bias else [])]
    mlp = _mlp_parameters(spec, layer, cut, replica)
    half = len(norms) // 2
    return [*map(Parameter, norms[:half] + qkv + out + qk_norms + norms[half:]), *mlp]


def end_parameters(spec: ModelSpec, layers: range, cut: Cut) -> tuple[list[Parameter], list[Parameter]]:
    """Of the embedding, if `layers` are the first; of the final norm and output table, if they are the last.

    A tied table on one rank is one parameter and counts to the first.
    """
    table = Parameter(size(cut.vocab) * spec.hidden_size)
    first, last = layers.start == 0, layers.stop == spec.num_layers
    head = [Parameter(spec.hidden_size), *([] if spec.tied and first else [table])] if last else []
    return ([table] if first else []), head


def run_parameters(spec: ModelSpec, layers: range, cut: Cut, replica: int = 0) -> Iterator[list[Parameter]]:
    """Of one run of layers, unit by unit: what is used together, the embedding first and the output table last."""
    first, last = end_parameters(spec, layers, cut)
    yield first
    for number in layers:
        yield layer_parameters(spec, spec.layers[number], cut, replica)
    yield last


def size(held: Range) -> int:
    return held[1] - held[0]


def _mlp_parameters(spec: ModelSpec, layer: LayerSpec, cut: Cut, replica: int) -> list[Parameter]:
    D, moe = spec.hidden_size, layer.moe
    if moe is None:
        width = size(cut.width)
        biases = (2 * width, D) if spec.mlp_bias else (0, 0)
        return [Parameter(n) for n in (2 * D * width, biases[0], D * width, biases[1]) if n]
    experts, spread = size(cut.holders[replica % len(cut.holders)]), len(cut.holders) > 1
    width = experts * D * size(cut.expert_width)
    parameters = [Parameter(D * moe.num_experts), Parameter(2 * width, spread), Parameter(width, spread)]
    if moe.shared_width:
        shared = D * size(cut.shared_width)
        parameters += map(Parameter, (2 * shared, shared, D))
    return parameters
