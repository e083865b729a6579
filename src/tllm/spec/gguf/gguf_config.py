"""A GGUF file's metadata as the `config.json` that the model had before: `spec.families` reads both alike.

An architecture is one function of `GgufKeys`, which hands out the keys `{architecture}.*` and remembers them. One that
nobody asked for is an error that names it, since it may change the maths. What a file does not say (the activation,
which layers have windows) is what llama.cpp takes for that architecture.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from tllm.core.errors import ModelError
from tllm.core.gguf_files import GgufFile
from tllm.core.gguf_header import TEXT, GgufArray, GgufTensor
from tllm.core.gguf_vocabulary import stop_ids, token_id
from tllm.spec.gguf.gguf_codings import TYPES
from tllm.spec.gguf.gguf_names import ARCHITECTURES as NAMES
from tllm.spec.gguf.gguf_names import parse_name

HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "vocab_size"})
"""Keys that do not change what is computed. The vocabulary is as long as the embedding in the file."""

PLAIN = frozenset({"F32", "F16", "BF16", "F64"})
"""Types of plain numbers."""
MOST = 65536
"""Heads or experts of a model; a file that says more is damaged."""
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
    keys = GgufKeys(file, architecture)
    config = {**_shared(keys), **ARCHITECTURES[architecture](keys)}
    keys.check_all_read()
    return {**config, TYPES: _types(keys, config["num_hidden_layers"])}


class GgufKeys:
    """Hands out the keys of one architecture; `check_all_read` names one that nobody asked for."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self._read: set[str] = set(HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value. A list with one value for each layer counts as that value if it is the same for all."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, GgufArray):
            items = set(value.values()) if value.count else set()
            if len(items) != 1:
                raise ModelError(
                    f"{self.file.header.file}: {self.architecture}.{key} differs among layers, which is not handled"
                )
            value = items.pop()
        return decimal(value) if isinstance(value, float) else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.file.header.file} has no {self.architecture}.{key}")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelError(
                f"{self.file.header.file}: {self.architecture}.{key}={value!r} is not a whole number of 0 or more"
            )
        return value

    def count(self, key: str, most: int, default: int | None = None) -> int:
        """A number of things, one at least, each of which something is made for."""
        value = self.number(key, default)
        if not 1 <= value <= most:
            raise ModelError(
                f"{self.file.header.file}: {self.architecture}.{key}={value}, and 1 to {most} are possible here"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, (bool, str)) or value is None or not 0 < value < math.inf:
            raise ModelError(f"{self.file.header.file}: {self.architecture}.{key}={value!r} is not a number above 0")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number above 0, or None where there is none or 0."""
        return self.positive(key) if self.get(key) else None

    def list_of(self, key: str) -> list[Any]:
        """A list with one value for each layer, empty where the file has none."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        return value.values() if isinstance(value, GgufArray) and value.kind != TEXT else []

    def has(self, tensor: str) -> bool:
        return tensor in self.file.header.tensors

    def tensor(self, name: str) -> GgufTensor:
        if name not in self.file.header.tensors:
            raise ModelError(f"{self.file.header.file} has no tensor {name!r}", "the file is incomplete")
        return self.file.header.tensors[name]

    def check_all_read(self) -> None:
        """Raise ModelError naming the first key that was not read. One that is 0, false or empty asks for nothing, and
        so does a factor of 1."""
        prefix = f"{self.architecture}."
        for key, value in sorted(self.file.metadata.items()):
            is_one = key.endswith(("rope.scaling.attn_factor", "_attn_factor", "_ext_factor")) and value == 1.0
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read and value and not is_one:
                raise ModelError(
                    f"{self.file.header.file} has a key {key!r} ({str(value)[:60]}) that is not handled",
                    "it may change the maths",
                )


def decimal(value: float) -> float:
    """The shortest decimal that this float32 stands for: 1e-05 where a file can only say 9.99999974737875e-06."""
    try:
        known = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", known)[0] == value:
        for digits in range(1, 10):
            short = float(f"{value:.{digits}g}")
            if struct.pack("<f", short) == known:
                return short
    return value


def _shared(keys: GgufKeys) -> dict[str, Any]:
    """What all architectures say the same way."""
    metadata, heads = keys.file.metadata, keys.count("attention.head_count", MOST)
    hidden, layers = keys.number("embedding_length"), keys.count("block_count", len(keys.file.header.tensors))
    head_dim = keys.number("attention.key_length", hidden // heads)
    if not hidden or not head_dim or head_dim % 2:
        raise ModelError(f"{keys.file.header.file} gives a width of {hidden} and heads of {head_dim}")
    if keys.number("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{keys.file.header.file}: values are as wide as keys ({head_dim}) in what is handled")
    if keys.get("attention.causal", True) is not True:
        raise ModelError(f"{keys.file.header.file}: attention is not causal", "only causal language models are served")
    embedding = keys.tensor("token_embd.weight").shape
    return {
        "model_type": keys.architecture,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
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
            found[name.weight.removesuffix(".weight")] = tensor.type.name
    return found


def _dtype(keys: GgufKeys) -> str:
    """What to compute in: float32 if the file has nothing but that, else bfloat16, in which such models were trained.

    Norms are float32 in every file, so the matrices decide.
    """
    kinds = {tensor.type.name for tensor in keys.file.header.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _rope(keys: GgufKeys, theta: float = 1e4) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, over the whole width of a head."""
    head_dim = keys.number(
        "attention.key_length", keys.number("embedding_length") // keys.number("attention.head_count")
    )
    turned = keys.number("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ModelError(f"{keys.file.header.file}: rope turns {turned} of a head's {head_dim}, which is not handled")
    return {"rope_theta": keys.positive("rope.freq_base", theta), "rope_scaling": _rope_scaling(keys)}


def _rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
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
        }
    if kind != "none":
        raise ModelError(
            f"{keys.file.header.file}: rope.scaling.type {kind!r} is not known", "known: none, linear, yarn"
        )
    return None


def _biases(keys: GgufKeys) -> dict[str, Any]:
    """Whether linears have biases, which only the tensors tell."""
    return {"attention_bias": _has_bias(keys, "attn"), "mlp_bias": _has_bias(keys, "ffn")}


def _has_bias(keys: GgufKeys, half: str) -> bool:
    """Whether any linear of the attention or the MLP has a bias: the model then asks for all that belong to it."""
    return any(name.startswith(f"blk.0.{half}_") and name.endswith(".bias") for name in keys.file.header.tensors)


def _llama(keys: GgufKeys) -> dict[str, Any]:
    """llama, mistral and mixtral: the files call them all llama."""
    if not keys.number("expert_count", 0):
        return {**_rope(keys), **_biases(keys)}
    experts = keys.count("expert_count", MOST)
    _check_softmax(keys, renormalised=True)
    return {
        **_rope(keys),
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "intermediate_size": keys.number("expert_feed_forward_length", keys.number("feed_forward_length")),
    }


def _qwen2(keys: GgufKeys) -> dict[str, Any]:
    return _rope(keys)


def _qwen3(keys: GgufKeys) -> dict[str, Any]:
    return {**_rope(keys), "attention_bias": _has_bias(keys, "attn")}


def _qwen2moe(keys: GgufKeys) -> dict[str, Any]:
    shared = keys.number("expert_shared_feed_forward_length", 0)
    return {
        **_rope(keys),
        **_experts(keys, renormalised=False),
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": shared or keys.tensor("blk.0.ffn_up_shexp.weight").shape[0],
        "qkv_bias": _has_bias(keys, "attn"),
    }


def _qwen3moe(keys: GgufKeys) -> dict[str, Any]:
    more = {"model_type": "qwen3_moe", "attention_bias": _has_bias(keys, "attn")}
    return {**_rope(keys), **_experts(keys, renormalised=True), **more}


def _experts(keys: GgufKeys, renormalised: bool) -> dict[str, Any]:
    """Qwen's experts, which every layer has."""
    _check_softmax(keys, renormalised)
    width = keys.number("expert_feed_forward_length", 0) or keys.tensor("blk.0.ffn_up_exps.weight").shape[-2]
    experts = keys.count("expert_count", MOST)
    return {
        "num_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count", experts),
        "moe_intermediate_size": width,
        "norm_topk_prob": renormalised,
    }


def _check_softmax(keys: GgufKeys, renormalised: bool) -> None:
    """The weights of experts are a softmax, and unscaled, in what is handled."""
    gating, scale = keys.number("expert_gating_func", 1), keys.get("expert_weights_scale", 1.0)
    norm = bool(keys.get("expert_weights_norm", renormalised))
    if gating not in (0, 1) or scale not in (0.0, 1.0) or norm != renormalised:
        raise ModelError(
            f"{keys.file.header.file}: experts weighted by function {gating}, scale {scale}, norm {norm} "
            f"are not handled for {keys.architecture}"
        )


def _gemma2(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_rope(keys),
        **_gemma_scale(keys, LAST_GEMMA2),
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        "sliding_window": keys.number("attention.sliding_window", 4096),
    }


def _gemma3(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_rope(keys, theta=1e6),
        **_gemma_scale(keys, LAST_GEMMA3),
        "model_type": "gemma3_text",
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", 1e4),
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
        **_windows(keys),
    }


def _windows(keys: GgufKeys) -> dict[str, Any]:
    """Which layers have windows: none, every layer but each sixth, or as the file says (a number, or a truth for
    each layer)."""
    layers, window = keys.number("block_count"), keys.number("attention.sliding_window", 0)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    windowed = keys.list_of("attention.sliding_window_pattern")
    if not windowed:
        pattern = keys.count("attention.sliding_window_pattern", MOST, 6)
        return {"sliding_window": window, "sliding_window_pattern": pattern}
    types = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {"sliding_window": window, "layer_types": types}


def _gemma_scale(keys: GgufKeys, layers_of_largest: int) -> dict[str, Any]:
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    largest = keys.number("block_count") == layers_of_largest
    return {
        "query_pre_attn_scalar": hidden // heads if largest else keys.number("attention.key_length", hidden // heads)
    }


def _phi3(keys: GgufKeys) -> dict[str, Any]:
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    head_dim = keys.number("attention.key_length", hidden // heads)
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


def _olmo2(keys: GgufKeys) -> dict[str, Any]:
    return {**_rope(keys), "attention_bias": _has_bias(keys, "attn")}


def _smollm3(keys: GgufKeys) -> dict[str, Any]:
    return {**_rope(keys), **_biases(keys)}


ARCHITECTURES: dict[str, Callable[[GgufKeys], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
}
"""What each `general.architecture` says, beside what all say."""
