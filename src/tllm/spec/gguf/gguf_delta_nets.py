"""GGUF files of models with gated delta nets: qwen3next, qwen35 and qwen35moe.

Their projections lie as llama.cpp computes with them: queries, keys and values of all heads one after another. In
qwen35 and qwen35moe value head n uses key head n modulo the number of key heads ("tiled").
"""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_parts import MOST, expert_keys, has_bias, own_layers, partial_rope_keys, shared_expert_keys


def qwen3next(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_with_delta_nets(keys),
        **expert_keys(keys, renormalised=True),
        **shared_expert_keys(keys),
        "model_type": "qwen3_next",
        "_gguf_heads": "apart",
    }


def qwen35(keys: GgufKeys) -> dict[str, Any]:
    return {**_with_delta_nets(keys), "model_type": "qwen3_5_text", "_gguf_heads": "tiled"}


def qwen35moe(keys: GgufKeys) -> dict[str, Any]:
    experts = expert_keys(keys, renormalised=True)
    del experts["norm_topk_prob"]  # which no config.json of this family has: they always are
    return {
        **_with_delta_nets(keys),
        **experts,
        **shared_expert_keys(keys),
        "model_type": "qwen3_5_moe_text",
        "_gguf_heads": "tiled",
    }


def _with_delta_nets(keys: GgufKeys) -> dict[str, Any]:
    """Sizes of the delta nets, which layers have them, and rope over a part of a head."""
    keys.ignore("rope.dimension_sections")  # of which text uses one position
    values, inner = keys.count("ssm.time_step_rank", MOST), keys.number("ssm.inner_size")
    if not inner or inner % values:
        raise ModelError(f"{keys.file.header.file}: ssm.inner_size={inner} is not made of {values} heads")
    return {
        "num_hidden_layers": own_layers(keys),
        "linear_num_key_heads": keys.count("ssm.group_count", values),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.count("ssm.state_size", MOST),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel", MOST),
        "full_attention_interval": keys.count("full_attention_interval", MOST, 4),
        **partial_rope_keys(keys),
        "attention_bias": has_bias(keys, "attn"),
    }
