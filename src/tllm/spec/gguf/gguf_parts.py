"""What several architectures of GGUF files say in the same way: rope, experts, windows, biases."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.gguf.gguf_keys import GgufKeys

MOST = 65536
"""Heads or experts of a model; a file that says more is damaged."""


def rope_keys(keys: GgufKeys, theta: float = 1e4) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, over the whole width of a head."""
    head_dim = head_width(keys)
    turned = keys.number("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ModelError(f"{keys.file.header.file}: rope turns {turned} of a head's {head_dim}, which is not handled")
    return {"rope_theta": keys.positive("rope.freq_base", theta), "rope_scaling": rope_scaling(keys)}


def partial_rope_keys(keys: GgufKeys) -> dict[str, Any]:
    """The same over a part of a head."""
    head_dim = head_width(keys)
    turned = keys.count("rope.dimension_count", head_dim, head_dim)
    return {
        "rope_theta": keys.positive("rope.freq_base", 1e4),
        "rope_scaling": rope_scaling(keys),
        "partial_rotary_factor": turned / head_dim,
    }


def head_width(keys: GgufKeys) -> int:
    """Widths of a head: the hidden state's over the heads, where the file does not say."""
    each = keys.number("embedding_length") // keys.count("attention.head_count", MOST)
    return keys.number("attention.key_length", each)


def own_layers(keys: GgufKeys) -> int:
    """Layers of the model. `block_count` counts those that predict further tokens too, which are left unread."""
    predicting = keys.number("nextn_predict_layers", 0)
    layers = keys.count("block_count", len(keys.file.header.tensors)) - predicting
    if layers < 1:
        raise ModelError(f"{keys.file.header.file}: all of its layers ({predicting}) predict further tokens")
    return layers


def rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.positive("rope.scaling.factor", keys.optional("rope.scale_linear") or 1.0)
    original = keys.number("rope.scaling.original_context_length", 0) or None
    if keys.has("rope_freqs.weight"):
        # Llama 3's scaling, worked out for each pair of a head's widths; nothing else is said of it.
        if kind not in ("none", "llama3"):
            raise ModelError(f"{keys.file.header.file} has rope_freqs and rope.scaling.type {kind!r} at once")
        return {"rope_type": "factors", "factors": list(keys.file.floats("rope_freqs.weight"))}
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.optional("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.optional("rope.scaling.yarn_beta_slow"),
            "attention_factor": keys.optional("rope.scaling.yarn_attn_factor"),
        }
    if kind != "none":
        raise ModelError(
            f"{keys.file.header.file}: rope.scaling.type {kind!r} is not known", "known: none, linear, yarn"
        )
    return None


def has_bias(keys: GgufKeys, half: str) -> bool:
    """Whether any linear of the attention or the MLP has a bias: the model then asks for all that belong to it."""
    return any(name.startswith(f"blk.0.{half}_") and name.endswith(".bias") for name in keys.file.header.tensors)


def biases(keys: GgufKeys) -> dict[str, Any]:
    """Whether linears have biases, which only the tensors tell."""
    return {"attention_bias": has_bias(keys, "attn"), "mlp_bias": has_bias(keys, "ffn")}


def expert_keys(keys: GgufKeys, renormalised: bool) -> dict[str, Any]:
    """Qwen's experts, which every layer has."""
    check_softmax(keys, renormalised)
    width = keys.number("expert_feed_forward_length", 0) or keys.tensor("blk.0.ffn_up_exps.weight").shape[-2]
    experts = keys.count("expert_count", MOST)
    return {
        "num_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "moe_intermediate_size": width,
        "norm_topk_prob": renormalised,
    }


def shared_expert_keys(keys: GgufKeys) -> dict[str, Any]:
    """The width of Qwen's expert that all tokens share: of its tensor, where no key gives it."""
    width = keys.number("expert_shared_feed_forward_length", 0) or keys.tensor("blk.0.ffn_up_shexp.weight").shape[0]
    return {"shared_expert_intermediate_size": width}


def check_softmax(keys: GgufKeys, renormalised: bool) -> None:
    """The weights of experts are a softmax, and unscaled, in what is handled."""
    gating, scale = keys.number("expert_gating_func", 1), keys.get("expert_weights_scale", 1.0)
    norm = bool(keys.get("expert_weights_norm", renormalised))
    if gating not in (0, 1) or scale not in (0.0, 1.0) or norm != renormalised:
        raise ModelError(
            f"{keys.file.header.file}: experts weighted by function {gating}, scale {scale}, norm {norm} "
            f"are not handled for {keys.architecture}"
        )


def window_keys(keys: GgufKeys, every: int = 6, default: int = 0) -> dict[str, Any]:
    """Which layers have windows: none, every layer but each sixth (`every`), or as the file says (a number, or a truth
    for each layer). `default`: the width where the file gives none, 0 for no windows."""
    layers, window = keys.number("block_count"), keys.number("attention.sliding_window", default)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    windowed = keys.list_of("attention.sliding_window_pattern")
    if not windowed:
        pattern = keys.count("attention.sliding_window_pattern", MOST, every)
        windowed = [bool((i + 1) % pattern) for i in range(layers)]
    types = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {"sliding_window": window, "layer_types": types}
