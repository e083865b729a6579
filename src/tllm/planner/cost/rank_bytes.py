"""How many elements each parameter of a rank has, and the bytes that each rank of a serving plan holds.

Both follow from the model's shape, the cut, and how the config says that weights are quantised; no weights are read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cost.flops import attention_matrices, delta_channels, delta_values
from tllm.planner.cost.weight_bits import Linear, linears, saved_bytes, saved_input_bytes, saved_table_bytes
from tllm.spec.cut import Cut, as_layer, cut_stage, projected_width, size, stage_cuts, width_of
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import DeltaSpec, LayerSpec, ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.quantized.cache_form import cached_bytes
from tllm.spec.quantized.weight_form import Quantize

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by dtype."""


def check_dtype(dtype: str) -> None:
    """PlanError for a dtype that no weights are computed in."""
    if dtype not in ITEM_BYTES:
        raise PlanError(f"dtype {dtype!r} is not known", "known: " + ", ".join(ITEM_BYTES))


ALL = "all-linear"
"""The target that stands for every linear that can be adapted."""


class Parameter(NamedTuple):
    """One parameter as a rank holds it."""

    elements: int
    """Elements on this rank."""
    spread: bool = False
    """Whether it belongs to whole experts that are divided over replicas (`ep`), so that other replicas hold others."""
    wide: bool = False
    """Whether it is held in float32 where the model's weights have 16 bits."""

    def nbytes(self, item: float) -> float:
        """Its bytes in a model whose numbers have `item` bytes."""
        return self.elements * (max(item, 4) if self.wide else item)


@dataclass(frozen=True)
class AdapterFacts:
    """What of a job's adapter decides what it costs.

    Its rank; the ends of names of linears that it is for; what plain weights of the model beside it are rounded to;
    whether each output has a magnitude of its own (DoRA); the ends of names of linears that it is not for; the layers
    that it is for, if not for all; whether some of its inputs are dropped.
    """

    rank: int
    targets: tuple[str, ...] = (ALL,)
    quantize: Quantize | None = None
    use_dora: bool = False
    excluded: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    drops: bool = False

    def adapts(self, module: str) -> bool:
        """Whether a linear has an update, in a layer that has some."""
        if _names(self.excluded, module):
            return False
        if ALL in self.targets:
            return ".experts." not in module and not module.endswith(".kv_b_proj")
        return _names(self.targets, module)


def _names(ends: tuple[str, ...], module: str) -> bool:
    return any(module == end or module.endswith(f".{end}") for end in ends)


def layer_parameters(spec: ModelSpec, layer: LayerSpec, cut: Cut, replica: int = 0) -> list[Parameter]:
    """The parameters of one layer. `replica` decides which of the experts spread over replicas are here."""
    norms = [spec.hidden_size] * (4 if spec.norm_order == "both" else 2)
    if layer.delta:
        attention = _delta_parameters(spec, layer, layer.delta, cut)
    else:
        attention = _latent_parameters(spec, layer, cut) if spec.latent else _attention_parameters(spec, layer, cut)
    mlp = _mlp_parameters(*as_layer(spec, layer, cut), layer, replica)
    half = len(norms) // 2
    matrix = spec.hidden_size * spec.per_layer_width
    own_input = [matrix, matrix, spec.hidden_size] if spec.per_layer_width else []
    scale = [1] * spec.layer_scale
    return [*map(Parameter, norms[:half] + attention + norms[half:]), *mlp, *map(Parameter, own_input + scale)]


def adapter_parameters(
    spec: ModelSpec, number: int, cut: Cut, adapter: AdapterFacts, replica: int = 0
) -> list[Parameter]:
    """The parameters of an adapter in one layer on a rank: A and B of each linear, those of all experts held here as
    one, and magnitudes. `replica` decides which of the experts spread over replicas are here."""
    outputs, inputs = defaultdict[str, int](int), dict[str, int]()
    for linear in adapted_linears(spec, number, cut, adapter, replica):
        outputs[linear.module] += linear.elements // linear.columns
        inputs[linear.module] = linear.columns
    found, experts = list[Parameter](), size(cut.holders[replica % len(cut.holders)])
    for name, count in outputs.items():
        of_experts = ".experts." in name
        columns, spread = inputs[name] * (experts if of_experts else 1), of_experts and len(cut.holders) > 1
        sizes = (adapter.rank * columns, adapter.rank * count, *([count] if adapter.use_dora else ()))
        found += [Parameter(elements, spread) for elements in sizes]
    return found


def adapted_linears(
    spec: ModelSpec, number: int, cut: Cut, adapter: AdapterFacts, replica: int = 0
) -> Iterator[Linear]:
    """The linears of one layer that an adapter adds to, as far as a rank holds some of them."""
    if adapter.layers and number not in adapter.layers:
        return
    layer, of = spec.layers[number], spec.latent
    found_here = [*linears(spec, number, cut, replica)]
    if of is not None and layer.delta is None:
        rows = size(cut.heads) * (of.plain_dim + of.value_dim)
        found_here.append(Linear(f"model.layers.{number}.self_attn.kv_b_proj", rows * of.width, of.width))
    yield from (linear for linear in found_here if adapter.adapts(linear.module) and linear.columns)


@lru_cache(64)
def as_learned(spec: ModelSpec, adapter: AdapterFacts | None) -> ModelSpec:
    """The model as attention computes it while it learns: where an adapter sees latents of which some columns are
    dropped, these stand behind the whole ones, in keys and in queries (`parallel.linear.HeadInputs`).

    The shapes of its weights are those of the model.
    """
    if spec.latent is None or adapter is None or not adapter.drops:
        return spec
    (whole,) = cut_stage(spec, (1,))
    layers = list(spec.layers)
    for number, layer in enumerate(layers):
        if any(one.module.endswith(".kv_b_proj") for one in adapted_linears(spec, number, whole, adapter)):
            layers[number] = replace(layer, head_dim=spec.head_dim + spec.latent.width)
    return replace(spec, layers=tuple(layers))


@lru_cache(64)
def lowest_adapted_layer(spec: ModelSpec, adapter: AdapterFacts) -> int:
    """The first layer that an adapter has parameters in."""
    (whole,) = cut_stage(spec, (1,))
    return next(number for number in range(spec.num_layers) if adapter_parameters(spec, number, whole, adapter))


def end_parameters(spec: ModelSpec, layers: range, cut: Cut) -> tuple[list[Parameter], list[Parameter]]:
    """The parameters of the model's two ends: the embedding, if `layers` are the first; the final norm and the output
    table, if they are the last. A tied table that one rank uses at both ends is counted once, with the embedding.

    With the embedding counts what makes the layers' own inputs, and the keys that they share with layers of other
    stages (gemma4).
    """
    table = Parameter(size(cut.vocab) * spec.hidden_size)
    first, last = layers.start == 0, layers.stop == spec.num_layers
    output = Parameter(spec.num_labels * spec.hidden_size) if spec.num_labels else table
    head = [Parameter(spec.hidden_size), *([] if spec.tied and first else [output])] if last else []
    return [*([table] if first else []), *_before_layers(spec, layers, cut)], head


def _before_layers(spec: ModelSpec, layers: range, cut: Cut) -> list[Parameter]:
    """What a stage has before its layers, beside the embedding."""
    widths, D = len(layers) * spec.per_layer_width, spec.hidden_size
    parameters = [size(cut.vocab) * widths, widths * D, spec.per_layer_width] if widths else []
    for source in spec.key_sources(layers, layers.start):
        layer = spec.layers[source]
        own, of_layer = as_layer(spec, layer, cut)
        rows = (1 if layer.keys_are_values else 2) * size(of_layer.kv_heads) * own.head_dim
        parameters += [D, rows * D, *([rows] if spec.attention_bias else []), own.head_dim]
    return [*map(Parameter, parameters)]


def run_parameters(spec: ModelSpec, layers: range, cut: Cut, replica: int = 0) -> Iterator[list[Parameter]]:
    """The parameters of one run of layers in units that are used together: embedding, each layer, output table."""
    first, last = end_parameters(spec, layers, cut)
    yield first
    for number in layers:
        yield layer_parameters(spec, spec.layers[number], cut, replica)
    yield last


def layer_bytes(spec: ModelSpec, number: int, cut: Cut, item: float) -> float:
    """Bytes of the weights of layer `number` when serving. A plain number takes `item` bytes."""
    plain = sum(parameter.nbytes(item) for parameter in layer_parameters(spec, spec.layers[number], cut))
    return plain - saved_bytes(spec, number, cut, item)


def end_bytes(spec: ModelSpec, layers: range, cut: Cut, item: float) -> tuple[float, float]:
    """Bytes of the model's two ends, as far as these `layers` bring them along, when serving."""
    parts = end_parameters(spec, layers, cut)
    first, last = (float(sum(parameter.nbytes(item) for parameter in part)) for part in parts)
    if layers.start == 0:
        first -= saved_table_bytes(spec, cut, item, head=False)
    first -= saved_input_bytes(spec, layers, cut, item)
    if len(parts[1]) > 1 and not spec.num_labels:
        last -= saved_table_bytes(spec, cut, item, head=True)
    return first, last


@dataclass(frozen=True)
class RankBytes:
    """What one rank of a serving plan holds."""

    rank: int
    stage: int
    layers: range
    cut: Cut
    weights: int
    """Bytes of weights."""
    kv_per_token: int
    """Bytes of keys and values, with their scales, that one token takes in all of this rank's layers."""


def kv_bytes(spec: ModelSpec, layer: LayerSpec, cut: Cut, item: int, kv_cache_dtype: str) -> int:
    """Bytes of keys and values of one token that a layer attends to; none where it has a state. Numbers of the model's
    dtype have `item` bytes."""
    if layer.delta:
        return 0
    spec, cut = as_layer(spec, layer, cut)
    return size(cut.kv_heads) * cached_bytes(spec.cached_width, 1 if spec.latent else 2, item, kv_cache_dtype)


def cached_layers(spec: ModelSpec, layers: range) -> list[int]:
    """The layers whose keys and values a stage that holds `layers` has in its cache: theirs, and those that they share
    with layers before them."""
    return sorted({spec.key_source(number) for number in layers})


def rank_bytes(spec: ModelSpec, plan: Plan, dtype: str, kv_cache_dtype: str = "auto") -> list[RankBytes]:
    """What every rank of a plan holds, weights in `dtype` and the cache as `kv_cache_dtype` says.

    Raises PlanError where the plan cannot be cut, ConfigError where there is no such cache.
    """
    plan.check(spec.num_layers)
    check_dtype(dtype)
    item = ITEM_BYTES[dtype]
    ranks: list[RankBytes] = []
    for index, stage in enumerate(plan.stages):
        layers = range(stage.start, stage.stop)
        for place, cut in enumerate(stage_cuts(spec, plan, index)):
            part = part_of_width(spec, plan.grid_of(index), place)
            weights = sum(end_bytes(part, layers, cut, item)) + sum(layer_bytes(part, n, cut, item) for n in layers)
            kv = sum(kv_bytes(spec, spec.layers[n], cut, item, kv_cache_dtype) for n in cached_layers(spec, layers))
            ranks.append(RankBytes(plan.ranks(index)[place], index, layers, cut, math.ceil(weights), kv))
    return ranks


def part_of_width(spec: ModelSpec, shape: GridShape | None, place: int) -> ModelSpec:
    """The model with as many columns of hidden states as the weights of a rank of a stage are for.

    On a grid, whose models are dense, every weight of the rank has these in the place of the hidden size.
    """
    return spec if shape is None else replace(spec, hidden_size=size(width_of(spec.hidden_size, shape, place)))


def state_bytes(spec: ModelSpec, layers: range, cut: Cut, item: float) -> int:
    """Bytes of one sequence's states in these layers, whose numbers are float32 at least."""
    deltas = [spec.layers[number].delta for number in layers]
    return sum(state_elements(of, cut) for of in deltas if of) * (8 if item == 8 else 4)


def state_elements(of: DeltaSpec, cut: Cut) -> int:
    """Numbers of one sequence's state in one layer: the convolution's last inputs, and a matrix of each value head."""
    return (of.kernel - 1) * delta_channels(of, cut) + of.key_dim * delta_values(of, cut)


def _attention_parameters(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> list[int]:
    rows = projected_width(spec, layer, cut)
    spec, cut = as_layer(spec, layer, cut)
    D, H = spec.hidden_size, spec.head_dim
    heads, kv = size(cut.heads) * H, size(cut.kv_heads) * H
    qk_norms = {"none": [], "head": [H, H], "full": [heads, kv]}[spec.qk_norm]
    if layer.shares_keys:
        qk_norms = qk_norms[:1]
    qkv = [D * rows, *([rows] if spec.attention_bias else [])]
    out = [heads * D, *([D] if spec.output_bias else [])]
    sinks = [size(cut.heads)] if spec.attention_sinks else []
    return qkv + out + qk_norms + sinks


def _delta_parameters(spec: ModelSpec, layer: LayerSpec, of: DeltaSpec, cut: Cut) -> list[int]:
    into, out = (matrix.elements for matrix in attention_matrices(spec, layer, cut))
    heads = size(cut.value_heads)
    return [into, heads, heads, delta_channels(of, cut) * of.kernel, of.value_dim, out]


def _latent_parameters(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> list[int]:
    of = spec.latent
    assert of is not None
    into_latents, queries, keys, values, out = (matrix.elements for matrix in attention_matrices(spec, layer, cut))
    biases = [of.latents] * spec.attention_bias + [spec.hidden_size] * spec.output_bias
    norms = [of.q_width, of.width] if of.q_width else [of.width]
    return [into_latents, queries, keys, values, out, *biases, *norms]


def _mlp_parameters(spec: ModelSpec, cut: Cut, layer: LayerSpec, replica: int) -> list[Parameter]:
    D, moe = spec.hidden_size, layer.moe
    if moe is None:
        width = size(cut.width)
        into = spec.into_mlp * width
        biases = (into, D) if spec.mlp_bias else (0, 0)
        return [Parameter(n) for n in (D * into, biases[0], D * width, biases[1]) if n]
    experts, spread = size(cut.holders[replica % len(cut.holders)]), len(cut.holders) > 1
    width = experts * D * size(cut.expert_width)
    parameters = [Parameter(D * moe.num_experts), Parameter(2 * width, spread), Parameter(width, spread)]
    if moe.router_bias:
        parameters.append(Parameter(moe.num_experts))
    if moe.clamp is not None:
        parameters.append(Parameter(2 * experts * size(cut.expert_width), spread))
        parameters += [Parameter(experts * D, spread)] if cut.expert_width[0] == 0 else []
    if moe.correction_bias:
        parameters.append(Parameter(moe.num_experts, wide=True))
    if moe.shared_width:
        shared = D * size(cut.shared_width)
        parameters += map(Parameter, (2 * shared, shared, *([D] if moe.shared_gate else [])))
    if moe.beside_mlp:
        parameters += map(Parameter, (D, D, D, D, moe.num_experts))  # three norms more, and the router's two weights
    return parameters
