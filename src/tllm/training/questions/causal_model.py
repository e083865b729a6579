"""`CausalModel`: a causal language model that is to answer runs, found by its folder or name. No weights yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tllm.core.errors import ConfigError
from tllm.hub.locate import locate
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec


class CausalModel(NamedTuple):
    """Its folder, and what `config.json` there says."""

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec

    @classmethod
    def find(cls, name: str, lack: str, hint: str) -> CausalModel:
        """ConfigError for a model without a head for tokens, of which `lack` says what it cannot do."""
        folder = Path(name) if Path(name).is_dir() else locate(name, "whole").path
        config = read_config(folder)
        spec = spec_from_config(config)
        if spec.num_labels:
            raise ConfigError(f"{name} has a classification head of {spec.num_labels} labels and {lack}", hint)
        if spec.bidirectional:
            raise ConfigError(f"{name} is not causal (each token sees those after it) and {lack}", hint)
        if spec.is_headless:
            raise ConfigError(f"{name} was saved without its head for tokens and {lack}", hint)
        return cls(folder, config, spec)
