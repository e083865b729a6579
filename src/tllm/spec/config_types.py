"""What kind of value each key of a `config.json` holds: a damaged file is one clear error, whatever family reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from tllm.core.errors import ModelError

SIZES = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "original_max_position_embeddings",
    "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "decoder_sparse_step",
    "no_rope_layer_interval", "rotary_dim", "head_dim",
    "global_head_dim", "num_global_key_value_heads", "top_k_experts",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "full_attention_interval",
})  # fmt: skip
COUNTS = frozenset({"sliding_window"})
FACTORS = frozenset({
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "attn_logit_softcapping", "final_logit_softcapping",
})  # fmt: skip
NAMES = frozenset({"layer_types", "mlp_layer_types"})
NUMBERS = frozenset({"no_rope_layers", "mlp_only_layers", "attn_type_list"})
TOKENS = frozenset({"bos_token_id", "eos_token_id"})
MAPPINGS = frozenset({"rope_parameters", "rope_scaling"})
ROPE_FLAGS = frozenset({"truncate", "mrope_interleaved", "finetuned"})
LARGEST = 1e300
"""Of numbers that any key may hold."""
WORDS = frozenset(
    {"hidden_act", "hidden_activation", "scoring_func", "topk_method", "qk_norm_type", "rope_type", "type"}
)


def check_types(values: dict[str, Any], inside: str = "config.json") -> None:
    """Raise ModelError for a value that is not of its kind. Null is absent; keys that are not known here pass."""
    for key, value in values.items():
        if value is None:
            continue
        for keys, is_one, what in CHECKS:
            if key in keys and not is_one(value):
                raise ModelError(f"{inside}: {key}={str(value)[:60]!r} is not {what}", "copy the file again")
        if key in MAPPINGS:
            _check_rope(value, f"{key} of {inside}")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_size(value: Any) -> bool:
    """Whether it is a whole number of 1 or more."""
    return is_number(value) and value == int(value) and value >= 1


def _check_rope(parameters: dict[str, Any], inside: str) -> None:
    """The parameters of one rope, or of the ropes of several kinds of layers."""
    check_types(parameters, inside)
    for key, value in parameters.items():
        if key in ROPE_FLAGS:
            if not isinstance(value, bool | None):
                raise ModelError(f"{inside}: {key}={str(value)[:60]!r} is not true or false", "copy the file again")
        elif isinstance(value, dict):
            _check_rope(value, f"{key} of {inside}")
        elif isinstance(value, list):
            if not value or not all(is_number(one) and one > 0 for one in value):
                raise ModelError(f"{inside}: {key} holds something that is not a number above 0", "copy the file again")
        elif not (value is None or key in WORDS or (is_number(value) and value >= 0)):
            raise ModelError(f"{inside}: {key}={str(value)[:60]!r} is not a number of 0 or more", "copy the file again")


def _is_token(value: Any) -> bool:
    return is_number(value) and value == int(value)


CHECKS: tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...] = (
    (SIZES, is_size, "a whole number of 1 or more"),
    (COUNTS, lambda value: is_number(value) and value == int(value) and value >= 0, "a whole number of 0 or more"),
    (FACTORS, lambda value: is_number(value) and value > 0, "a number above 0"),
    (NAMES, lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of names"),
    (NUMBERS, lambda value: isinstance(value, list) and all(map(is_number, value)), "a list of numbers"),
    (
        TOKENS,
        lambda value: all(map(_is_token, value if isinstance(value, list) else [value])),
        "a token id, or several",
    ),
    (MAPPINGS, lambda value: isinstance(value, dict), "an object"),
    (WORDS, lambda value: isinstance(value, str), "a word"),
)
