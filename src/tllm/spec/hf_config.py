"""`Config`: a `config.json` that remembers which of its keys were read, so that none goes unnoticed.

Of a multimodal checkpoint it is that of the text part alone, its `text_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tllm.core.errors import ConfigError, ModelError
from tllm.core.gguf_files import open_gguf
from tllm.core.gguf_header import MAGIC
from tllm.core.model_folders import json_table
from tllm.spec.config_types import check_types, is_number
from tllm.spec.gguf.gguf_codings import gguf_quantization
from tllm.spec.gguf.gguf_config import gguf_config
from tllm.spec.quantized.quantization_config import read_quantization
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.spec.quantized.weight_form import QUANTIZE, Quantize, keeps_few_bits, rounded_modules

log = logging.getLogger("tllm.model")

HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id",
    "cls_token_id", "decoder_start_token_id", "return_dict", "output_attentions", "output_hidden_states",
    "torchscript", "name_or_path", "unsloth_version", "unsloth_fixed", "id2label", "label2id", "problem_type",
    "task_specific_params", "tokenizer_class", "finetuning_task", "cache_implementation", "hidden_dropout",
    "attn_implementation", "is_encoder_decoder", "auto_map", "pretraining_tp", "is_llama_config",
    "transformers.js_config", "max_sequence_length",
})  # fmt: skip
"""Keys that say how a model was trained, saved or called, not what it computes."""

GEMMA3 = dict(
    model_type="gemma3_text",
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
)
"""Published files give only what differs from this."""

HEAD_DIM = {"qwen3": 128, "qwen3_vl_text": 128, "gemma2": 256}
"""Widths of a head where a file leaves it out; in other families that leave it out, the hidden width over the heads."""

MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA3,
    "gemma4": dict(model_type="gemma4_text"),
    "gemma4_unified": dict(model_type="gemma4_unified_text"),
    "mistral3": dict(model_type="mistral"),
    "qwen3_vl": dict(model_type="qwen3_vl_text"),
    "qwen3_5": dict(model_type="qwen3_5_text"),
    "qwen3_5_moe": dict(model_type="qwen3_5_moe_text"),
}
"""`model_type` of a multimodal model -> what its `text_config` holds where a file leaves it out."""

OTHER_PARTS = frozenset({
    "architectures", "model_type", "text_config", "vision_config", "audio_config",
    "image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "boi_token_index", "eoi_token_index",
    "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id",
    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "vision_feature_layer",
})  # fmt: skip
"""Keys of the whole that say nothing of its text part."""

WHOLE_DECIDES = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Keys that the whole and its text part may both have, and that count as the whole has them.

Where the whole says nothing of `tie_word_embeddings` the text part's counts, and transformers has a default of each
whole. They come to the same numbers or to an error, as a head in the files is compared with the table.
"""


ROUNDED: dict[str, Coding] = {"int8": Coding(8, 32), "int4": Coding(4, 32)}
"""What `--quantize` makes: groups of 32 columns, each with a float16 scale."""


class Config:
    """Hands out the keys of a `config.json`; `check_all_read` names one that nobody asked for.

    A key set to null or false asks for nothing and passes. So do keys that start with an underscore.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.family = str(raw["model_type"])
        check_types(raw)
        self._read = {"quantization_config", "quantization"}

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value: the default where the file leaves it out, None where it has null."""
        self._read.add(key)
        return self.raw.get(key, default)

    def number(self, key: str, default: int | None = None) -> int:
        self._read.add(key)
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {key}", "every model of this family gives it")
        if not is_number(value) or value != int(value) or value < 0:
            raise ModelError(f"config.json: {key}={value!r} is not a whole number of 0 or more")
        return int(value)

    def same_number(self, *keys: str, default: int | None = None) -> int:
        """A number that a file gives under any of these names; under several only if they agree."""
        given = {key: self.number(key) for key in keys if self.raw.get(key) is not None}
        self.ignore(*keys)
        if len(set(given.values())) > 1:
            named = " and ".join(f"{key}={value}" for key, value in given.items())
            raise ModelError(f"config.json: {named} are to be the same", "take out the one that is wrong")
        return next(iter(given.values())) if given else self.number(keys[0], default)

    def positive(self, key: str, default: float | None = None) -> float:
        self._read.add(key)
        value = self.raw.get(key)
        value = default if value is None else value
        if not is_number(value) or not value > 0:
            raise ModelError(f"config.json: {key}={value!r} is not a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False, null: bool | None = None) -> bool:
        """True or false; the default where the file leaves it out. `null`: what null means, if it is not that."""
        self._read.add(key)
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise ModelError(f"config.json: {key}={str(value)[:60]!r} is not true or false", "copy the file again")
        if value is None:
            return null if null is not None and key in self.raw else default
        return value

    def head_dim(self) -> int:
        given = self.number("head_dim", HEAD_DIM.get(self.family, 0))
        width = given or self.number("hidden_size") // self.number("num_attention_heads")
        if not width:
            raise ModelError(
                f"config.json: hidden_size={self.raw['hidden_size']} is too little for the "
                f"{self.raw['num_attention_heads']} of num_attention_heads",
                "copy the file again",
            )
        return width

    def dtype(self) -> str:
        """The dtype the weights were saved in, float32 where the file does not say."""
        return str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)

    def ignore(self, *keys: str) -> None:
        """Keys of this family that do not change what the forward pass computes."""
        self._read.update(keys)

    def check_all_read(self) -> None:
        """Raise ModelError naming the first key that was not read and is not known to be harmless."""
        for key, value in sorted(self.raw.items()):
            if key in self._read or key in HARMLESS or key.startswith("_") or value is None or value is False:
                continue
            raise ModelError(
                f"config.json of a {self.family} model has a key {key!r} ({str(value)[:60]}) that is not handled",
                "it may change the maths; if it does not, remove the key from config.json",
            )


def is_multimodal(raw: dict[str, Any]) -> bool:
    return isinstance(raw.get("model_type"), str) and raw["model_type"] in MULTIMODAL


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part alone; that of a text model is returned as it is.

    Any other key of the whole is handed down, so that the text part's family refuses what it does not know.
    """
    if not is_multimodal(raw):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json of a {raw['model_type']} model has no text_config", "copy the file again")
    whole = {key: value for key, value in raw.items() if key not in OTHER_PARTS and value is not None}
    decided = {key: whole[key] for key in WHOLE_DECIDES if key in whole}
    return {**MULTIMODAL[raw["model_type"]], **whole, **text, **decided}


def held_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """How a model's weights are held in memory: as its files keep them, or as is asked (`spec.quantized.weight_form`).

    None where all are plain numbers. ConfigError where weights of few bits are to be rounded once more.
    """
    files, wish = read_quantization(config) or gguf_quantization(config), config.get(QUANTIZE)
    if not keeps_few_bits(config):
        return None
    if wish is None:
        return files
    if files is not None:
        raise ConfigError(
            f"--quantize {wish} rounds plain weights, and those of this model have few bits already ({files.method})",
            "leave --quantize out",
        )
    if wish not in ROUNDED:
        raise ConfigError(f"--quantize {wish!r} is not known", "known: " + ", ".join(ROUNDED))
    return rounded(wish, config.get("tie_word_embeddings", False))


def rounded(wish: Quantize, tied: bool) -> Quantization:
    """How plain weights are held that are rounded while they are loaded."""
    return Quantization(wish, tuple((pattern, ROUNDED[kind]) for pattern, kind in rounded_modules(wish, tied)))


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder, or that file itself, with the stop ids of its `generation_config.json` where
    that has more. Of a multimodal model it is the text part's, and it is said that only this is read. What a GGUF file
    says, if one is given, or the folder that it is the only model of."""
    gguf = open_gguf(folder)
    if gguf is not None:
        return gguf_config(gguf)
    path = folder if folder.is_file() else folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not path.exists():
        raise ModelError(
            f"{folder} is a LoRA adapter and no whole model",
            f"serve it beside its model, `tllm serve MODEL --enable-lora --lora-modules NAME={folder}`, or merge "
            f"it, `tllm export MODEL OUT --adapter {folder}`",
        )
    if not path.exists():
        raise ModelError(f"{folder} has no config.json", "give the folder of a Hugging Face model")
    if path.suffix != ".json":
        if _begins_as_gguf(folder):
            raise ModelError(
                f"the name of the GGUF file {folder} does not end with .gguf",
                f"give a link to it, `ln -s {folder.resolve()} model.gguf`, or ollama:NAME for one of ollama's",
            )
        raise ModelError(
            f"{folder} is neither a model's folder nor a GGUF file",
            f"give its folder, {folder.parent}" if path.suffix == ".safetensors" else "give the folder of a model",
        )
    raw, generation = json_table(path, ModelError), path.parent / "generation_config.json"
    if generation.is_file():
        extra = json_table(generation, ModelError)
        if extra.get("eos_token_id") is not None:
            raw["eos_token_id"] = extra["eos_token_id"]
    if is_multimodal(raw):
        _say(f"{folder}: of this {raw['model_type']} model only the text part is read, not what sees or hears")
    return text_config(raw)


@lru_cache
def _say(message: str) -> None:
    """Once for each model, however often its config is read."""
    log.warning(message)
