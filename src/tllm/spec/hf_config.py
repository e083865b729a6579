"""`Config`: a `config.json` that remembers which of its keys were read, so that none goes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tllm.core.errors import ModelError
from tllm.core.gguf_files import open_gguf
from tllm.spec.gguf.gguf_config import gguf_config

HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id",
    "cls_token_id", "decoder_start_token_id", "return_dict", "output_attentions", "output_hidden_states",
    "torchscript", "name_or_path", "unsloth_version", "unsloth_fixed", "id2label", "label2id", "problem_type",
    "task_specific_params", "tokenizer_class", "finetuning_task", "cache_implementation", "hidden_dropout",
    "attn_implementation", "is_encoder_decoder",
})  # fmt: skip
"""Keys that say how a model was trained, saved or called, not what it computes."""


class Config:
    """Hands out the keys of a `config.json`; `check_all_read` names one that nobody asked for.

    A key set to null or false asks for nothing and passes. So do keys that start with an underscore.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.family = str(raw["model_type"])
        self._read: set[str] = set()
        if raw.get("quantization_config"):
            raise ModelError(
                "quantization_config: this checkpoint is quantised and this version reads plain weights only",
                "use the model's unquantised (bfloat16 or float16) folder",
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value; null counts as absent only where the default is not None."""
        self._read.add(key)
        value = self.raw.get(key, default)
        return default if value is None and key not in self.raw else value

    def number(self, key: str, default: int | None = None) -> int:
        self._read.add(key)
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json has no {key}", "every model of this family gives it")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
            raise ModelError(f"config.json: {key}={value!r} is not a whole number of 0 or more")
        return int(value)

    def positive(self, key: str) -> float:
        self._read.add(key)
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"config.json: {key}={value!r} is not a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        self._read.add(key)
        value = self.raw.get(key)
        return default if value is None else bool(value)

    def head_dim(self) -> int:
        given = self.number("head_dim", 0)
        return given or self.number("hidden_size") // self.number("num_attention_heads")

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


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder, or that file itself, with the stop ids of its `generation_config.json` where
    that has more. What a GGUF file says, if one is given, or the folder that it is the only model of."""
    gguf = open_gguf(folder)
    if gguf is not None:
        return gguf_config(gguf)
    path = folder if folder.is_file() else folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json", "give the folder of a Hugging Face model") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    generation = path.parent / "generation_config.json"
    if generation.is_file():
        try:
            extra = json.loads(generation.read_bytes())
        except ValueError as error:
            raise ModelError(f"{generation} cannot be read: {error}") from error
        if extra.get("eos_token_id") is not None:
            raw["eos_token_id"] = extra["eos_token_id"]
    return raw
