"""Small models as GGUF files, written with `gguf.GGUFWriter` as llama.cpp's converter does it, and what they hold.

The converter's changes are written here once more, from its own formulas: q and k of NORM-rope architectures with the
rows of each head in pairs, gemma's norms as 1 + weight, experts in stacks, vectors squeezed, heads of gated delta nets
sorted by what they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.support.models.gguf_parts import (
    describe_dense,
    describe_gpt_oss,
    describe_grouped,
    is_of_gpt_oss,
    of_gpt_oss,
    of_latents,
)

Array = NDArray[Any]
Kinds = Callable[[str], str]
"""kinds(name in the file) -> the type to keep a matrix in"""

ARCHITECTURES = {
    "mixtral": "llama",
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "minimax_m2": "minimax-m2",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "qwen3_vl_text": "qwen3vl",
}
"""What llama.cpp calls a model_type, where it is another word."""
PAIRED = ("llama", "smollm3", "granite", "mistral3", "arcee")
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
NORM_OFFSET = ("gemma2", "gemma3", *DELTA_NETS)

HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
}  # fmt: skip
"""At which bytes of a block its float16 numbers are: the scale, and the scale of minima or the minimum."""
QUANTIZED = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
"""Types that gguf can quantise to; matrices of the others are given random codes instead."""
MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q4_1": -7.5, "Q5_1": -15.5}
"""The second of them, for a first of 1, so that weights are about as often below 0 as above it."""


class Model(Protocol):
    """What is written: a model of transformers, or one that has as much."""

    @property
    def config(self) -> Any: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...


class TextPart:
    """That of a model which also sees, by the names of a text model."""

    def __init__(self, model: Model) -> None:
        self.config, self._model = model.config.text_config, model
        self.config.tie_word_embeddings = model.config.tie_word_embeddings

    def state_dict(self) -> dict[str, torch.Tensor]:
        named = self._model.state_dict().items()
        return {key.replace("language_model.", ""): x for key, x in named if not key.startswith("model.visual.")}


class SavedModel:
    """The weights of a folder, as float32, with its config.json."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
        self.config = SimpleNamespace(**raw, rope_parameters=rope)
        self._weights = {name: x.float() for name, x in load_file(folder / "model.safetensors").items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._weights


def with_tokenizer(folder: Path) -> Callable[[gguf.GGUFWriter], None]:
    """Adds what a folder with a byte-level tokenizer.json and a chat template has to say."""
    state = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab, added = state["model"]["vocab"], {token["content"] for token in state["added_tokens"]}

    def add(writer: gguf.GGUFWriter) -> None:
        tokens = sorted(vocab, key=lambda token: vocab[token])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in added else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
        writer.add_eos_token_id(vocab[config["eos_token"]])
        writer.add_chat_template(config["chat_template"])

    return add


def random_blocks(kind: str, rows: int, columns: int, dice: np.random.Generator, size: float = 1.0) -> Array:
    """[rows, bytes] of a type, every bit of the codes random, the weights of about the given size."""
    width, nbytes = gguf.GGML_QUANT_SIZES[_type(kind)]
    raw = dice.integers(0, 256, (rows, columns // width, nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = dice.integers(120, 127, raw.shape[:-1])
        return raw.reshape(rows, -1)
    scales = dice.uniform(0.5, 1.5, raw.shape[:-1])
    of_one = 1.0
    for step in (1.0, None):
        for at, middle in zip(HALVES[kind], (1.0, MIDDLE.get(kind, 1.0)), strict=False):
            numbers = (scales * middle * of_one).astype(np.float16)
            raw[..., at : at + 2] = numbers[..., None].view(np.uint8)
        if step:
            of_one = size / float(gguf.quants.dequantize(raw.reshape(rows, -1), _type(kind)).std())
    return raw.reshape(rows, -1)


def write_gguf(
    model: Model,
    path: Path,
    kinds: Kinds = lambda name: "F32",
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split: int = 0,
    old: bool = False,
) -> Path:
    """Write the model, and give its own parameters the numbers that are then in the file.

    `metadata` adds to what is said of the model. `split`: tensors in each file, 0 for all in one.
    `old`: as files of deepseek2 were before they had keys and values apart.
    """
    if hasattr(model.config, "text_config"):
        model = TextPart(model)
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    if name == "gemma4":  # heads of the layers with a window, where no layer is named
        config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split)
    _describe(writer, config, name, old)
    metadata(writer)
    dice = np.random.default_rng(0)
    for title, part, changed in tensors_of(model, name, old):
        is_matrix = part.ndim > 1 and part.numel() > part.shape[-1] and not title.endswith(".bias")
        kind = kinds(title) if is_matrix else "F32"
        array = changed(part.detach().numpy())
        if part.ndim and array.shape[-1] % gguf.GGML_QUANT_SIZES[_type(kind)][0]:
            kind = "F16"  # as quantisers do with rows that are no whole number of blocks
        raw, kept = _quantized(array, kind, dice)
        writer.add_tensor(title, raw, raw_dtype=_type(kind))
        if changed is _decay:
            continue
        with torch.no_grad():
            part.copy_(torch.from_numpy(_back(part.detach().numpy(), changed, kept)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else path.with_name(f"{path.stem}-00001-of-{len(writer.tensors):05}.gguf")


def tensors_of(
    model: Model, name: str, old: bool = False
) -> Iterator[tuple[str, torch.Tensor, Callable[[Array], Array]]]:
    """(name in the file, view of the model's parameter, how the converter changes it)"""
    config = model.config
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, kind = key.rpartition(".") if key.endswith((".weight", ".bias")) else (key, "", "weight")
        if name in DELTA_NETS and "linear_attn." in key:
            yield from _of_delta_net(key, value, config, name)
            continue
        if name == "gpt-oss" and is_of_gpt_oss(key):
            yield from of_gpt_oss(key, value)
            continue
        if base.endswith("kv_b_proj"):
            yield from of_latents(key, value, config, old)
            continue
        if base.endswith("e_score_correction_bias"):
            yield f"blk.{key.split('.')[2]}.exp_probs_b.bias", value, np.ascontiguousarray
            continue
        if base.endswith(("router.scale", "router.per_expert_scale")):
            part = "ffn_gate_inp" if base.endswith("r.scale") else "ffn_down_exps"
            yield f"blk.{key.split('.')[2]}.{part}.scale", value, np.ascontiguousarray
            continue
        if base.endswith("layer_scalar"):
            yield f"blk.{key.split('.')[2]}.layer_output_scale.weight", value, np.ascontiguousarray
            continue
        if base.endswith("experts.gate_up_proj") and name != "gemma4":
            layer, half = key.split(".")[2], value.shape[1] // 2
            yield f"blk.{layer}.ffn_gate_exps.weight", value[:, :half], np.ascontiguousarray
            yield f"blk.{layer}.ffn_up_exps.weight", value[:, half:], np.ascontiguousarray
            continue
        title = names.get_name(base)
        assert title is not None, base
        yield f"{title}.{kind}", value, _change(title, name, config)


def _change(title: str, name: str, config: Any) -> Callable[[Array], Array]:
    if name in PAIRED and title.endswith(("attn_q", "attn_k")):
        heads = config.num_attention_heads if title.endswith("attn_q") else config.num_key_value_heads

        def permuted(x: Array) -> Array:
            return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

        return permuted
    if name in NORM_OFFSET and title.endswith("norm") and not title.endswith("ssm_norm"):
        return lambda x: x + np.float32(1)
    return np.squeeze


def _of_delta_net(
    key: str, value: torch.Tensor, config: Any, name: str
) -> Iterator[tuple[str, torch.Tensor, Callable[[Array], Array]]]:
    """qwen3next: queries, keys and values of all heads apart from the gates, in the model's order. qwen35: the value
    heads of one key head are as many key heads apart."""
    layer, part = key.split(".")[2], key.split(".linear_attn.")[1].removesuffix(".weight")
    G, N = config.linear_num_key_heads, config.linear_num_value_heads
    K, V, R = config.linear_key_head_dim, config.linear_value_head_dim, N // G

    def tiled(x: Array, width: int, start: int = 0) -> Array:
        heads = x[start:].reshape(G, R, width, *x.shape[1:]).swapaxes(0, 1).reshape(x[start:].shape)
        return np.concatenate([x[:start], heads])

    def plain(x: Array) -> Array:
        return x

    def of_heads(width: int, start: int = 0) -> Callable[[Array], Array]:
        return plain if name == "qwen3next" else lambda x: tiled(x, width, start)

    def queries_keys_values(x: Array) -> Array:
        heads = x.reshape(G, 2 * K + 2 * R * V, -1)
        spans = (0, K), (K, 2 * K), (2 * K, 2 * K + R * V)
        return np.concatenate([heads[:, first:last].reshape(-1, x.shape[1]) for first, last in spans])

    def gates(x: Array) -> Array:
        return x.reshape(G, 2 * K + 2 * R * V, -1)[:, 2 * K + R * V :].reshape(-1, x.shape[1])

    if part == "in_proj_qkvz":
        yield f"blk.{layer}.attn_qkv.weight", value, queries_keys_values
        yield f"blk.{layer}.attn_gate.weight", value, gates
    elif part == "A_log":
        order = of_heads(1)
        with torch.no_grad():  # the same order that `_decay` leaves as it is
            yield f"blk.{layer}.ssm_a", torch.from_numpy(order(value.numpy()[:, None])[:, 0]), _decay
    else:
        title, change = {
            "in_proj_ba": ("ssm_ba.weight", plain),
            "in_proj_qkv": ("attn_qkv.weight", of_heads(V, 2 * G * K)),
            "in_proj_z": ("attn_gate.weight", of_heads(V)),
            "in_proj_b": ("ssm_beta.weight", of_heads(1)),
            "in_proj_a": ("ssm_alpha.weight", of_heads(1)),
            "dt_bias": ("ssm_dt.bias", lambda x: of_heads(1)(x[:, None])[:, 0]),
            "conv1d": ("ssm_conv1d.weight", lambda x: of_heads(V, 2 * G * K)(x[:, 0])),
            "norm": ("ssm_norm.weight", plain),
            "out_proj": ("ssm_out.weight", lambda x: of_heads(V)(x.T).T),
        }[part]
        yield f"blk.{layer}.{title}", value, lambda x: np.ascontiguousarray(change(x))


def _decay(x: Array) -> Array:
    """What a file has in the place of A_log."""
    return -np.exp(x)


def _back(before: Array, changed: Callable[[Array], Array], kept: Array) -> Array:
    """What a parameter must be so that its changed form is `kept`: moved elements are followed by their numbers."""
    places = np.arange(before.size, dtype=np.int64).reshape(before.shape)
    moved = changed(places)
    if moved.dtype != np.int64:  # not moved but added to
        return (kept.reshape(before.shape) - np.float32(1)).astype(np.float32)
    out = before.astype(np.float32).reshape(-1).copy()
    out[moved.reshape(-1)] = kept.reshape(-1)
    return out.reshape(before.shape)


def _quantized(array: Array, kind: str, dice: np.random.Generator) -> tuple[Array, Array]:
    """(what the file gets, what that stands for)"""
    if kind == "F32":
        return array.astype(np.float32), array.astype(np.float32)
    if kind == "F16":
        return array.astype(np.float16), array.astype(np.float16).astype(np.float32)
    if kind not in QUANTIZED:
        rows = array.reshape(-1, array.shape[-1])
        raw = random_blocks(kind, *rows.shape, dice, float(array.std())).reshape(*array.shape[:-1], -1)
    else:
        raw = gguf.quants.quantize(np.ascontiguousarray(array), _type(kind))
    return raw, gguf.quants.dequantize(raw, _type(kind)).reshape(array.shape)


def _type(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind]


def _describe(writer: gguf.GGUFWriter, config: Any, name: str, old: bool) -> None:
    """The keys that the converter writes for these architectures."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    far = rope.get("full_attention", rope)
    writer.add_rope_freq_base(far["rope_theta"])
    if name not in NORM_OFFSET or name in DELTA_NETS:
        writer.add_rope_dimension_count(int(head_dim * far.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config.vocab_size)
    if far["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(far, head_dim))
    elif far["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(
            (1 + np.log(config.max_position_embeddings / config.original_max_position_embeddings)
             / np.log(config.original_max_position_embeddings)) ** 0.5
        )  # fmt: skip
        writer.add_tensor("rope_factors_long.weight", np.array(far["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(far["short_factor"], dtype=np.float32))
    elif far["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(far["rope_type"]))
        writer.add_rope_scaling_factor(far["factor"])
        if far["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(far["original_max_position_embeddings"])
            for key in ("beta_fast", "beta_slow", "attn_factor"):
                if far.get(key) is not None:
                    getattr(writer, f"add_rope_scaling_yarn_{key}")(far[key])
    if name.startswith("gemma") or name == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name in DELTA_NETS:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        if name != "qwen3next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
    if name == "gemma4":
        _describe_gemma4(writer, config)
    if name == "gpt-oss":
        describe_gpt_oss(writer, config)
    describe_dense(writer, config)
    if name in ("glm4moe", "deepseek2"):
        describe_grouped(writer, config, old)
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for key in counts if (count := getattr(config, key, None))), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, "num_experts_per_tok", None) or config.top_k_experts)
        if name not in ("llama", "gpt-oss", "minimax-m2"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if name in ("qwen2moe", "qwen3next", "qwen35moe"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _describe_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Over what was said: sizes of each layer, and rope whose last pairs on layers that see all hardly turn."""
    near = [kind == "sliding_attention" for kind in config.layer_types]
    of_layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    far_dim = of_layers[near.index(False)].head_dim
    far = config.rope_parameters["full_attention"]
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window_pattern(near)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(far_dim)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.use_double_wide_mlp:
        own = config.num_hidden_layers - config.num_kv_shared_layers
        writer.add_feed_forward_length([config.intermediate_size * (1 + (i >= own)) for i in range(len(near))])
    if config.attention_k_eq_v:
        writer.add_head_count_kv([one.num_key_value_heads for one in of_layers])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    turned = int(far_dim * far["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (far_dim // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Array:
    """What the converter works out of Llama 3's scaling: by how much each pair's frequency is divided."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        length = 2 * np.pi / frequency
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
