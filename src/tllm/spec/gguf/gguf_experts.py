"""GGUF files of models with experts whose weights are no plain softmax: gpt-oss."""

from __future__ import annotations

from typing import Any

from tllm.core.errors import ModelError
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_parts import MOST, has_bias, rope_keys, window_keys

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
        "intermediate_size": keys.count("expert_feed_forward_length", 2**31),
        "attention_bias": has_bias(keys, "attn"),
        **window_keys(keys, every=2),
    }


def _check_gating(keys: GgufKeys, function: int) -> None:
    """How experts are chosen, where a file says it."""
    given, scale = keys.number("expert_gating_func", function), keys.get("expert_weights_scale", 1.0)
    if given not in (0, function) or scale not in (0.0, 1.0):
        raise ModelError(
            f"{keys.file.header.file}: experts weighted by function {given} and scale {scale} are not handled for "
            f"{keys.architecture}"
        )
