"""The linears of a layer that may be quantised, and how many bytes they save.

Biases, norms and routers are always plain, and so are the model's ends unless its config says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tllm.planner.cost.flops import delta_channels, delta_values
from tllm.spec.cut import Cut, as_layer, cut_stage, size
from tllm.spec.model_spec import DeltaSpec, LatentSpec, ModelSpec


class Linear(NamedTuple):
    """One linear as a rank holds it. Of experts it is the first, for all of them."""

    module: str
    """The checkpoint's name, without `.weight`."""
    elements: int
    columns: int
    """Inputs of each output on this rank."""


def linears(spec: ModelSpec, number: int, cut: Cut, replica: int = 0) -> Iterator[Linear]:
    """The linears of layer `number`, without its router."""
    D, name, layer = spec.hidden_size, f"model.layers.{number}", spec.layers[number]
    spec, cut = as_layer(spec, layer, cut)
    moe = layer.moe
    heads, kv = size(cut.heads) * spec.head_dim, size(cut.kv_heads) * spec.head_dim
    attention = f"{name}.self_attn"
    rows = {"qkv_proj": heads + 2 * kv} if spec.fused_qkv else {"q_proj": heads, "k_proj": kv, "v_proj": kv}
    if layer.keys_are_values or layer.shares_keys:
        del rows["v_proj"]
    if layer.shares_keys:
        del rows["k_proj"]
    if spec.attention_gate:
        rows["q_proj"] *= 2
    if layer.delta:
        yield from _delta(spec, layer.delta, f"{name}.linear_attn", cut)
    elif spec.latent is None:
        yield from (Linear(f"{attention}.{part}", D * width, D) for part, width in rows.items())
        yield Linear(f"{attention}.o_proj", D * heads, heads)
    else:
        yield from _latent(spec, spec.latent, attention, size(cut.heads))
    P = spec.per_layer_width
    if P:
        yield Linear(f"{name}.per_layer_input_gate", P * D, D)
        yield Linear(f"{name}.per_layer_projection", D * P, P)
    if moe is None:
        gate_up = ("gate_up_proj",) * 2 if spec.fused_gate_up else ("gate_proj", "up_proj")
        yield from _mlp(f"{name}.mlp", (*(gate_up if spec.gated else gate_up[1:]), "down_proj"), D, size(cut.width), 1)
        return
    experts = size(cut.holders[replica % len(cut.holders)])
    if moe.style == "gpt_oss":
        width = size(cut.expert_width)
        yield Linear(f"{name}.mlp.experts.0.gate_up_proj", experts * 2 * width * D, D)
        yield Linear(f"{name}.mlp.experts.0.down_proj", experts * width * D, width)
        return
    gated = "gate_proj", "up_proj", "down_proj"
    where, parts = f"{name}.mlp.experts.0", gated
    if moe.style in ("mixtral", "minimax"):
        where, parts = f"{name}.block_sparse_moe.experts.0", ("w1", "w3", "w2")
    elif moe.style == "gemma4":
        where = f"{name}.experts.0"
    yield from _mlp(where, parts, D, size(cut.expert_width), experts)
    if moe.shared_width:
        shared = {"glm": "mlp.shared_experts", "gemma4": "mlp"}.get(moe.style, "mlp.shared_expert")
        yield from _mlp(f"{name}.{shared}", gated, D, size(cut.shared_width), 1)


def _latent(spec: ModelSpec, of: LatentSpec, attention: str, heads: int) -> Iterator[Linear]:
    """Those of attention over latents; `kv_b_proj` is used otherwise than in products and stays plain."""
    D = spec.hidden_size
    if of.q_width:
        yield Linear(f"{attention}.q_a_proj", D * of.q_width, D)
        yield Linear(f"{attention}.q_b_proj", of.q_width * heads * of.query_dim, of.q_width)
    else:
        yield Linear(f"{attention}.q_proj", D * heads * of.query_dim, D)
    yield Linear(f"{attention}.kv_a_proj_with_mqa", D * (of.width + of.rope_dim), D)
    yield Linear(f"{attention}.o_proj", D * heads * of.value_dim, heads * of.value_dim)


def _delta(spec: ModelSpec, of: DeltaSpec, name: str, cut: Cut) -> Iterator[Linear]:
    """Those of a gated delta net."""
    D, values, heads = spec.hidden_size, delta_values(of, cut), size(cut.value_heads)
    qkv = delta_channels(of, cut)
    parts = {"qkvz": qkv + values} if of.fused else {"qkv": qkv, "z": values}
    parts |= {"ba": 2 * heads} if of.fused_ba else {"b": heads, "a": heads}
    yield from (Linear(f"{name}.in_proj_{part}", D * width, D) for part, width in parts.items())
    yield Linear(f"{name}.out_proj", D * values, values)


def saved_bytes(spec: ModelSpec, number: int, cut: Cut, item: float, replica: int = 0) -> float:
    """Bytes that the weights of layer `number` take less than in plain numbers of `item` bytes."""
    if spec.quantization is None:
        return 0.0
    return sum(_saved(spec, linear, item) for linear in linears(spec, number, cut, replica))


def saved_table_bytes(spec: ModelSpec, cut: Cut, item: float, head: bool) -> float:
    """The same of the embedding, or of the output head."""
    module = "lm_head" if head and not spec.tied else "model.embed_tokens"
    return _saved(spec, Linear(module, size(cut.vocab) * spec.hidden_size, spec.hidden_size), item)


def shared_linears(spec: ModelSpec, layers: range, cut: Cut) -> Iterator[Linear]:
    """Those that make the keys and values which `layers` share with layers of earlier stages."""
    for source in spec.key_sources(layers, layers.start):
        found = linears(spec, source, cut)
        yield from (one for one in found if one.module.endswith(("self_attn.k_proj", "self_attn.v_proj")))


def saved_input_bytes(spec: ModelSpec, layers: range, cut: Cut, item: float) -> float:
    """The same of what makes the own inputs of `layers`, where they have some, and of keys that they share with layers
    of other stages."""
    D, widths = spec.hidden_size, len(layers) * spec.per_layer_width
    held = [
        Linear("model.embed_tokens_per_layer", size(cut.vocab) * widths, widths),
        Linear("model.per_layer_model_projection", widths * D, D),
        *shared_linears(spec, layers, cut),
    ]
    return sum(_saved(spec, linear, item) for linear in held)


@lru_cache(maxsize=64)
def mean_linear_bytes(spec: ModelSpec, item: float) -> float:
    """Bytes of one weight of the layers' linears, on an average over the model."""
    if spec.quantization is None:
        return item
    (cut,) = cut_stage(spec, (1,))
    found = [linear for number in range(spec.num_layers) for linear in linears(spec, number, cut)]
    elements = sum(linear.elements for linear in found)
    return item - sum(_saved(spec, linear, item) for linear in found) / elements


def _mlp(name: str, parts: tuple[str, ...], width: int, inner: int, count: int) -> Iterator[Linear]:
    for part in parts[:-1]:
        yield Linear(f"{name}.{part}", count * width * inner, width)
    yield Linear(f"{name}.{parts[-1]}", count * width * inner, inner)


def _saved(spec: ModelSpec, linear: Linear, item: float) -> float:
    if spec.quantization is None or linear.columns == 0:
        return 0.0
    bits = spec.quantization.bits_of(linear.module, linear.columns)
    return 0.0 if bits is None else linear.elements * (item - bits / 8)
