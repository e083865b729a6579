"""GGUF files of dense families: what each says beside what all do."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_parts import (
    biases,
    has_bias,
    head_width,
    own_layers,
    partial_rope_keys,
    rope_keys,
    window_keys,
)

WINDOWED_EXAONE, ITS_WINDOW = 64, 4096
"""Layers of the one EXAONE 4 that has windows, and what they are where the file does not say."""


def olmo2(keys: GgufKeys) -> dict[str, Any]:
    """OLMo 2, and with windows OLMo 3: three of four layers have them, whose contexts are not scaled."""
    rope, bias = rope_keys(keys), {"attention_bias": has_bias(keys, "attn")}
    if not keys.number("attention.sliding_window", 0):
        return {**rope, **bias}
    theta, scaling = rope["rope_theta"], rope["rope_scaling"] or {"rope_type": "default"}
    near = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", theta)}
    return {
        "model_type": "olmo3",
        "rope_parameters": {"full_attention": {**scaling, "rope_theta": theta}, "sliding_attention": near},
        **window_keys(keys, every=4),
        **bias,
    }


def with_biases(keys: GgufKeys) -> dict[str, Any]:
    """llama, smollm3 and arcee, whose linears may have biases."""
    return {**rope_keys(keys), **biases(keys)}


def granite(keys: GgufKeys) -> dict[str, Any]:
    if keys.get("rope.scaling.finetuned", True) is False:
        raise ModelError(f"{keys.file.header.file}: a granite model without rope is not handled")
    return {
        **with_biases(keys),
        "embedding_multiplier": keys.optional("embedding_scale") or 1.0,
        "attention_multiplier": keys.optional("attention.scale") or head_width(keys) ** -0.5,
        "residual_multiplier": keys.optional("residual_scale") or 1.0,
        "logits_scaling": keys.positive("logit_scale"),
    }


def seed_oss(keys: GgufKeys) -> dict[str, Any]:
    return {
        **rope_keys(keys),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "attention_out_bias": keys.has("blk.0.attn_output.bias"),
        "mlp_bias": has_bias(keys, "ffn"),
    }


def mistral3(keys: GgufKeys) -> dict[str, Any]:
    """Ministral 3, whose queries grow with their position, and Mistral Small 3.1 and later, whose do not."""
    rope, beta = rope_keys(keys), keys.optional("attention.temperature_scale")
    if beta is None:
        return {"model_type": "mistral", "sliding_window": None, **rope}
    scaling, of_all = rope["rope_scaling"], keys.optional("rope.scaling.yarn_log_multiplier")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise ModelError(f"{keys.file.header.file}: queries grow with their position, and there is no YaRN")
    return {
        "model_type": "ministral3",
        "rope_parameters": {
            **scaling,
            "rope_theta": rope["rope_theta"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"]
            or keys.number("context_length"),
            "mscale": of_all and 1.0,
            "mscale_all_dim": of_all,
            "llama_4_scaling_beta": beta,
        },
    }


def exaone4(keys: GgufKeys) -> dict[str, Any]:
    windows = window_keys(keys, every=4, default=ITS_WINDOW if keys.number("block_count") == WINDOWED_EXAONE else 0)
    return {**rope_keys(keys), **windows}


def ernie4_5(keys: GgufKeys) -> dict[str, Any]:
    return {**rope_keys(keys), "use_bias": has_bias(keys, "attn")}


def glm4(keys: GgufKeys) -> dict[str, Any]:
    return {
        **partial_rope_keys(keys),
        "num_hidden_layers": own_layers(keys),
        "attention_bias": has_bias(keys, "attn"),
    }


def qwen3vl(keys: GgufKeys) -> dict[str, Any]:
    """qwen3 as the text part of a model that sees: on text the sections of its rope have equal positions."""
    keys.ignore("rope.dimension_sections", "n_deepstack_layers")
    return {"model_type": "qwen3_vl_text", **rope_keys(keys), "attention_bias": has_bias(keys, "attn")}
