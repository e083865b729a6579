"""GGUF files of models whose experts are not Qwen's or Mixtral's: gpt-oss, glm4moe, minimax-m2, and deepseek2, which
is DeepSeek's V2, V3 and R1, Kimi K2 and GLM 4.7 Flash."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_parts import (
    MOST,
    has_bias,
    head_width,
    own_layers,
    partial_rope_keys,
    rope_keys,
    rope_scaling,
    window_keys,
)

SOFTMAX, SIGMOID, CHOSEN_SOFTMAX = 1, 2, 3
"""`expert_gating_func`, as llama.cpp counts them."""


def gpt_oss(keys: GgufKeys) -> dict[str, Any]:
    """Windows on every other layer, from the first on. YaRN's bounds are no whole numbers, as every model of this
    family was trained and no file says; llama.cpp rounds them."""
    _check_gating(keys, CHOSEN_SOFTMAX)
    rope, experts = rope_keys(keys), keys.count("expert_count", MOST)
    scaling, base = rope["rope_scaling"], rope["rope_theta"]
    if scaling is None or scaling["rope_type"] != "yarn" or keys.positive("rope.freq_base_swa", base) != base:
        raise ModelError(
            f"{keys.file.header.file}: a gpt-oss model has YaRN and one rope.freq_base, and this file says otherwise"
        )
    return {
        "model_type": "gpt_oss",
        "rope_theta": base,
        "rope_scaling": {**scaling, "truncate": False},
        "num_local_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "intermediate_size": keys.count("expert_feed_forward_length", 2**31 - 1),
        "attention_bias": has_bias(keys, "attn"),
        **window_keys(keys, every=2),
    }


def glm4moe(keys: GgufKeys) -> dict[str, Any]:
    """Rope turns a part of a head. Its sections, of files of models that also see, have equal positions on text."""
    keys.ignore("rope.dimension_sections")
    _check_gating(keys, SIGMOID, scaled=True)
    return {
        "model_type": "glm4_moe",
        **partial_rope_keys(keys),
        **_grouped_experts(keys),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "attention_bias": has_bias(keys, "attn"),
    }


def deepseek2(keys: GgufKeys) -> dict[str, Any]:
    """Attention over latents: `key_length` is a latent's with its rotated key, `key_length_mla` a head's own. Old files
    have the latter alone, under the former's name, and the norm of a latent has its own epsilon in no file.

    A group counts by its best expert where experts are chosen by softmax (DeepSeek-V2); llama.cpp takes the best two.
    """
    gating = SIGMOID if keys.number("expert_gating_func", SOFTMAX) == SIGMOID else SOFTMAX
    _check_gating(keys, gating, scaled=True)
    moe, heads = _grouped_experts(keys), keys.count("attention.head_count", MOST)
    query_dim = keys.count("attention.key_length_mla", MOST, keys.number("attention.key_length"))
    rope_dim = keys.count("rope.dimension_count", query_dim - 1)
    method = "group_limited_greedy" if moe["n_group"] > 1 else "greedy"
    return {
        "model_type": "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        "rope_theta": keys.positive("rope.freq_base", 1e4),
        "rope_scaling": _yarn_of_latents(keys),
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "q_lora_rank": keys.number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank", 2**20),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": query_dim - rope_dim,
        "v_head_dim": keys.count("attention.value_length_mla", MOST, keys.number("attention.value_length")),
        **moe,
        **({} if gating == SIGMOID else {"topk_method": method}),
    }


def minimax_m2(keys: GgufKeys) -> dict[str, Any]:
    _check_gating(keys, SIGMOID)
    experts = keys.count("expert_count", MOST)
    rope, head_dim = partial_rope_keys(keys), head_width(keys)
    return {
        "model_type": "minimax_m2",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope["rope_scaling"],
        "rotary_dim": round(rope["partial_rotary_factor"] * head_dim),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "intermediate_size": keys.count("expert_feed_forward_length", 2**31 - 1),
    }


def _yarn_of_latents(keys: GgufKeys) -> dict[str, Any] | None:
    """YaRN that sharpens the scores and leaves what is rotated at its length: a tenth of how much is in the file."""
    scaling, sharper = rope_scaling(keys), keys.optional("rope.scaling.yarn_log_multiplier")
    if scaling is None:
        return None
    if scaling["rope_type"] != "yarn" or sharper is None:
        raise ModelError(
            f"{keys.file.header.file}: rope.scaling of type {scaling['rope_type']!r} and yarn_log_multiplier {sharper} "
            "are not handled for deepseek2"
        )
    of_all = round(10 * sharper, 6)
    return {**scaling, "mscale": of_all, "mscale_all_dim": of_all}


def _grouped_experts(keys: GgufKeys) -> dict[str, Any]:
    """Experts behind the first, dense layers, from the best groups where there are groups, and those that all share."""
    experts = keys.count("expert_count", MOST)
    return {
        "num_hidden_layers": own_layers(keys),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "n_routed_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "moe_intermediate_size": keys.count("expert_feed_forward_length", 2**31 - 1),
        "n_shared_experts": keys.number("expert_shared_count", 0),
        "n_group": keys.number("expert_group_count", 0) or 1,
        "topk_group": keys.number("expert_group_used_count", 0) or 1,
        "routed_scaling_factor": keys.optional("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
    }


def _check_gating(keys: GgufKeys, function: int, scaled: bool = False) -> None:
    """How experts are chosen, where a file says it. `scaled`: whether their weights may be scaled."""
    given, scale = keys.number("expert_gating_func", function), keys.get("expert_weights_scale", 1.0)
    if given not in (0, function) or (not scaled and scale not in (0.0, 1.0)):
        raise ModelError(
            f"{keys.file.header.file}: experts weighted by function {given} and scale {scale} are not handled for "
            f"{keys.architecture}"
        )
