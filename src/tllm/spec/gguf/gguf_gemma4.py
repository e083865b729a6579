"""GGUF files of gemma4, whose layers are not all alike: some keys give a value for each layer."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_parts import MOST, check_softmax, has_bias

UNLIKE = frozenset({"feed_forward_length", "attention.head_count_kv", "attention.sliding_window_pattern"})
"""Keys whose values may differ among layers."""
STILL = 1e20
"""A factor of rope from here on stands for a pair that does not turn; files say 1e30."""


def gemma4(keys: GgufKeys) -> dict[str, Any]:
    layers = keys.number("block_count")
    windowed = [bool(each) for each in keys.list_of("attention.sliding_window_pattern")]
    if len(windowed) != layers:
        raise ModelError(f"{keys.file.header.file}: sliding_window_pattern is of {len(windowed)} layers, not {layers}")
    near_dim, far_dim = keys.count("attention.key_length_swa", MOST), keys.count("attention.key_length", MOST)
    if keys.number("attention.value_length_swa", near_dim) != near_dim:
        raise ModelError(f"{keys.file.header.file}: values are as wide as keys ({near_dim}) in what is handled")
    near, far = _kv_heads(keys, windowed)
    far_layer = windowed.index(False) if False in windowed else 0
    k_eq_v = not keys.has(f"blk.{far_layer}.attn_v.weight")
    return {
        "model_type": "gemma4_text" if near == far or k_eq_v else "gemma4_unified_text",
        "head_dim": near_dim,
        "global_head_dim": far_dim,
        "num_key_value_heads": near,
        "num_global_key_value_heads": far,
        "attention_k_eq_v": k_eq_v,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": keys.number("attention.sliding_window"),
        "rope_parameters": _ropes(keys, near_dim, far_dim),
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
        "hidden_size_per_layer_input": keys.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": keys.tensor("token_embd.weight").shape[0],
        "attention_bias": has_bias(keys, "attn"),
        **_sharing(keys, layers),
        **_experts(keys),
    }


def _kv_heads(keys: GgufKeys, windowed: list[bool]) -> tuple[int, int]:
    """Key-value heads of layers with a window, and of the others."""
    heads = keys.count("attention.head_count_kv", keys.number("attention.head_count"))
    counts = [int(count) for count in keys.list_of("attention.head_count_kv")] or [heads] * len(windowed)
    found = [{count for count, near in zip(counts, windowed, strict=False) if near is kind} for kind in (True, False)]
    if len(counts) != len(windowed) or any(len(of_kind) > 1 for of_kind in found):
        raise ModelError(f"{keys.file.header.file}: head_count_kv {counts} differs among layers of one kind")
    near, far = (of_kind.pop() if of_kind else heads for of_kind in found)
    return near, far


def _sharing(keys: GgufKeys, layers: int) -> dict[str, Any]:
    """How many of the last layers use the keys of earlier ones, and whether their MLPs are twice as wide."""
    shared, width = keys.number("attention.shared_kv_layers", 0), keys.number("feed_forward_length")
    widths = [int(each) for each in keys.list_of("feed_forward_length")] or [width] * layers
    wide = widths[-1] != width
    if widths != [width] * (layers - shared) + [2 * width if wide else width] * shared:
        raise ModelError(
            f"{keys.file.header.file}: feed_forward_length {widths} differs otherwise than by the {shared} layers that "
            "share keys"
        )
    return {"num_kv_shared_layers": shared, "use_double_wide_mlp": wide}


def _ropes(keys: GgufKeys, near_dim: int, far_dim: int) -> dict[str, Any]:
    """The first pairs of a head turn on layers that see all, and the factors of the others are next to endless."""
    turned = keys.number("rope.dimension_count", far_dim), keys.number("rope.dimension_count_swa", near_dim)
    kind = keys.get("rope.scaling.type", "none")
    if turned != (far_dim, near_dim) or kind != "none":
        raise ModelError(f"{keys.file.header.file}: rope of {turned} widths and scaling {kind!r} is not handled")
    keys.tensor("rope_freqs.weight")
    factors = keys.file.floats("rope_freqs.weight")
    first = next((place for place, factor in enumerate(factors) if factor != 1.0), len(factors))
    if len(factors) != far_dim // 2 or not first or min(factors[first:], default=STILL) < STILL:
        raise ModelError(f"{keys.file.header.file}: the factors of rope_freqs do not say which pairs turn")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": keys.positive("rope.freq_base", 1e6),
            "partial_rotary_factor": 2 * first / far_dim,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 1e4)},
    }


def _experts(keys: GgufKeys) -> dict[str, Any]:
    if not keys.number("expert_count", 0):
        keys.ignore("expert_used_count", "expert_feed_forward_length")
        return {}
    experts = keys.count("expert_count", MOST)
    check_softmax(keys, renormalised=True)
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": keys.count("expert_used_count", experts),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
    }
