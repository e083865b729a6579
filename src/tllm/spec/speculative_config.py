"""`SpeculativeConfig`: who drafts tokens ahead for a served model, and how many. Its keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.quantized.weight_form import Quantize, with_weight_form

DEFAULT_DRAFT_TOKENS = 5
"""Draft tokens of a sequence at most, where the config does not say."""

EXAMPLE = (
    """'{"model": "FOLDER", "num_speculative_tokens": 5}', or '{"method": "ngram", "num_speculative_tokens": 8}'"""
)

Method = Literal["ngram", "draft_model"]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Up to `num_speculative_tokens` draft tokens of a sequence: looked up in its text and, with a `model`, drafted.

    `model` is a folder of a Hugging Face model or a GGUF file, whose plain weights `quantization` rounds while they are
    loaded. It runs on the node of the first rank, in the target's dtype. `method` follows from it.
    """

    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS
    method: Method | None = None
    model: str = ""
    quantization: Quantize | None = None

    @property
    def folder(self) -> Path | None:
        """Where the draft model is; None if drafts are only looked up."""
        return Path(self.model) if self.model else None

    def read_config(self) -> dict[str, Any]:
        """The draft model's `config.json`, with its weights in the form that is asked for.

        ConfigError where there is none.
        """
        folder = self.folder
        assert folder is not None, "there is a draft model"
        if not folder.is_dir() and not folder.is_file():
            raise ConfigError(
                f"the draft model {folder} is not a folder or a GGUF file",
                "give the folder of a Hugging Face model, with its config.json, or a GGUF file",
            )
        return with_weight_form(read_config(folder), self.quantization)

    def draft_spec(self) -> ModelSpec | None:
        """What the draft model is; None if drafts are only looked up.

        ConfigError where its layers have a state: a draft that was wrong is taken back, and a state cannot be; and for
        a model that is not causal.
        """
        if not self.model:
            return None
        spec = spec_from_config(self.read_config())
        if spec.bidirectional:
            raise ConfigError(f"the draft model {self.model} is not causal: it embeds and cannot write", "give another")
        if spec.delta is not None:
            raise ConfigError(
                f"the draft model {self.model} has layers with a state in place of keys and values",
                "drafts that were wrong are taken back, and a state cannot be: give a model with attention alone",
            )
        return spec


def read_speculative_config(given: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
    """From JSON, from a dict, or as it is. ConfigError where it is not what it says."""
    config = given if isinstance(given, SpeculativeConfig) else _converted(given)
    if config.num_speculative_tokens < 1:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens is {config.num_speculative_tokens}, at least 1 is drafted",
            "4 to 16 are usual; leave the config out for none",
        )
    if config.method == "draft_model" and not config.model:
        raise ConfigError("speculative_config: the method draft_model needs a model", f"such as {EXAMPLE}")
    if config.method == "ngram" and (config.model or config.quantization):
        raise ConfigError(
            "speculative_config: the method ngram looks tokens up and takes no model",
            "leave out method, or model and quantization",
        )
    if config.quantization and not config.model:
        raise ConfigError("speculative_config: quantization is there and no model", f"such as {EXAMPLE}")
    return config


def _converted(given: str | Mapping[str, Any]) -> SpeculativeConfig:
    try:
        if isinstance(given, str):
            return msgspec.json.decode(given, type=SpeculativeConfig)
        return msgspec.convert(dict(given), SpeculativeConfig)
    except UNREADABLE as error:
        hint = f"give {EXAMPLE}"
        if "`node`" in str(error):
            hint = "a draft model runs on the node of the first rank: leave out node"
        raise ConfigError(f"speculative_config cannot be read: {error}", hint) from error
