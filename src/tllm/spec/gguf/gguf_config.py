"""A GGUF file's metadata as the `config.json` that the model had before: `spec.families` reads both alike.

An architecture is one function of `GgufKeys`, which hands out the keys `{architecture}.*` and remembers them. One that
nobody asked for is an error that names it, since it may change the maths. What a file does not say (the activation,
which layers have windows) is what llama.cpp takes for that architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tllm.core.errors import ModelError
from tllm.core.gguf_files import GgufFile
from tllm.core.gguf_vocabulary import stop_ids, token_id
from tllm.spec.gguf.gguf_codings import TYPES
from tllm.spec.gguf.gguf_delta_nets import qwen3next, qwen35, qwen35moe
from tllm.spec.gguf.gguf_dense import (
    ernie4_5,
    exaone4,
    glm4,
    granite,
    mistral3,
    olmo2,
    qwen3vl,
    seed_oss,
    with_biases,
)
from tllm.spec.gguf.gguf_experts import deepseek2, glm4moe, gpt_oss, minimax_m2
from tllm.spec.gguf.gguf_gemma4 import UNLIKE, gemma4
from tllm.spec.gguf.gguf_keys import GgufKeys
from tllm.spec.gguf.gguf_names import ARCHITECTURES as NAMES
from tllm.spec.gguf.gguf_names import parse_name, types_by_turns
from tllm.spec.gguf.gguf_parts import (
    MOST,
    check_softmax,
    expert_keys,
    has_bias,
    head_width,
    rope_keys,
    shared_expert_keys,
    window_keys,
)

PLAIN = frozenset({"F32", "F16", "BF16", "F64"})
"""Types of plain numbers."""
OVER_LATENTS = ("deepseek2",)
"""Architectures whose keys and values are latents, which have widths of their own."""
LAST_GEMMA2, LAST_GEMMA3 = 46, 62
"""Layers of the largest Gemma 2 and 3, whose scores are scaled by width / heads; in the others by the head's width."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The keys of a `config.json`. ModelError for an architecture or a key that is not handled."""
    architecture = file.metadata.get("general.architecture")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{file.header.file} holds a {kind} and not a model", "give the file of the model itself")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.header.file}: architecture {architecture!r} is not known", "known: " + ", ".join(ARCHITECTURES)
        )
    keys = GgufKeys(file, architecture, UNLIKE if architecture == "gemma4" else frozenset())
    config = {**_shared(keys), **ARCHITECTURES[architecture](keys)}
    keys.check_all_read()
    return {**config, TYPES: _types(keys, config["num_hidden_layers"])}


def _shared(keys: GgufKeys) -> dict[str, Any]:
    """What all architectures say the same way."""
    metadata, heads = keys.file.metadata, keys.count("attention.head_count", MOST)
    hidden, layers = keys.number("embedding_length"), keys.count("block_count", len(keys.file.header.tensors))
    head_dim = keys.number("attention.key_length", hidden // heads)
    if not hidden or not head_dim or head_dim % 2:
        raise ModelError(f"{keys.file.header.file} gives a width of {hidden} and heads of {head_dim}")
    if keys.number("attention.value_length", head_dim) != head_dim and keys.architecture not in OVER_LATENTS:
        raise ModelError(f"{keys.file.header.file}: values are as wide as keys ({head_dim}) in what is handled")
    if keys.get("attention.causal", True) is not True:
        raise ModelError(f"{keys.file.header.file}: attention is not causal", "only causal language models are served")
    embedding = keys.tensor("token_embd.weight").shape
    return {
        "model_type": keys.architecture,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length", keys.number("expert_feed_forward_length", 0) or None),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads, heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length", 2**31),
        "tie_word_embeddings": not keys.has("output.weight"),
        "bos_token_id": token_id(metadata, "bos", embedding[0]),
        "eos_token_id": list(stop_ids(metadata)),
        "dtype": _dtype(keys),
    }


def _types(keys: GgufKeys, layers: int) -> dict[str, str]:
    """The type of each weight that is in blocks, by the model's name of it without `.weight`, `{}` for any expert."""
    found: dict[str, str] = {}
    for tensor in keys.file.header.tensors.values():
        name = parse_name(tensor.name, NAMES[keys.architecture], layers)
        if name is not None and tensor.type.name not in PLAIN:
            found |= {weight.removesuffix(".weight"): tensor.type.name for weight in name.weights}
    return types_by_turns(found) if NAMES[keys.architecture].by_turns else found


def _dtype(keys: GgufKeys) -> str:
    """What to compute in: float32 if the file has nothing but that, else bfloat16, in which such models were trained.

    Norms are float32 in every file, so the matrices decide.
    """
    kinds = {tensor.type.name for tensor in keys.file.header.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _llama(keys: GgufKeys) -> dict[str, Any]:
    """llama, mistral and mixtral: the files call them all llama."""
    if not keys.number("expert_count", 0):
        return with_biases(keys)
    experts = keys.count("expert_count", MOST)
    check_softmax(keys, renormalised=True)
    return {
        **rope_keys(keys),
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "intermediate_size": keys.number("expert_feed_forward_length", keys.number("feed_forward_length")),
    }


def _qwen3(keys: GgufKeys) -> dict[str, Any]:
    return {**rope_keys(keys), "attention_bias": has_bias(keys, "attn")}


def _qwen2moe(keys: GgufKeys) -> dict[str, Any]:
    return {
        **rope_keys(keys),
        **expert_keys(keys, renormalised=False),
        **shared_expert_keys(keys),
        "model_type": "qwen2_moe",
        "qkv_bias": has_bias(keys, "attn"),
    }


def _qwen3moe(keys: GgufKeys) -> dict[str, Any]:
    more = {"model_type": "qwen3_moe", "attention_bias": has_bias(keys, "attn")}
    return {**rope_keys(keys), **expert_keys(keys, renormalised=True), **more}


def _gemma2(keys: GgufKeys) -> dict[str, Any]:
    return {
        **rope_keys(keys),
        **_gemma_scale(keys, LAST_GEMMA2),
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        "sliding_window": keys.number("attention.sliding_window", 4096),
    }


def _gemma3(keys: GgufKeys) -> dict[str, Any]:
    return {
        **rope_keys(keys, theta=1e6),
        **_gemma_scale(keys, LAST_GEMMA3),
        "model_type": "gemma3_text",
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", 1e4),
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
        **window_keys(keys),
    }


def _gemma_scale(keys: GgufKeys, layers_of_largest: int) -> dict[str, Any]:
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    largest = keys.number("block_count") == layers_of_largest
    return {"query_pre_attn_scalar": hidden // heads if largest else head_width(keys)}


def _phi3(keys: GgufKeys) -> dict[str, Any]:
    head_dim = head_width(keys)
    config = {
        "rope_theta": keys.positive("rope.freq_base", 1e4),
        "partial_rotary_factor": keys.number("rope.dimension_count", head_dim) / head_dim,
        "sliding_window": keys.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": keys.number("rope.scaling.original_context_length", 0) or None,
    }
    kind, factor = keys.get("rope.scaling.type", "none"), keys.optional("rope.scaling.attn_factor")
    if kind not in ("none", "longrope"):
        raise ModelError(f"{keys.file.header.file}: rope.scaling.type {kind!r} is not handled for phi3")
    if not keys.has("rope_factors_short.weight"):
        return config
    short, long = (list(keys.file.floats(f"rope_factors_{which}.weight")) for which in ("short", "long"))
    return {
        **config,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": factor,
        },
    }


ARCHITECTURES: dict[str, Callable[[GgufKeys], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": rope_keys,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": olmo2,
    "smollm3": with_biases,
    "granite": granite,
    "seed_oss": seed_oss,
    "mistral3": mistral3,
    "exaone4": exaone4,
    "arcee": with_biases,
    "ernie4_5": ernie4_5,
    "glm4": glm4,
    "qwen3vl": qwen3vl,
    "minimax-m2": minimax_m2,
    "qwen3next": qwen3next,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "gemma4": gemma4,
    "gpt-oss": gpt_oss,
    "glm4moe": glm4moe,
    "deepseek2": deepseek2,
}
"""What each `general.architecture` says, beside what all say."""
