"""`AnsweringModel`: a model that is to answer runs, found by its folder or name. No weights yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tllm.core.errors import ConfigError, counted
from tllm.hub.locate import locate
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec


class AnsweringModel(NamedTuple):
    """Its folder, and what `config.json` there says."""

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec

    @classmethod
    def find_causal(cls, name: str, lack: str, hint: str) -> AnsweringModel:
        """ConfigError for a model without a head for tokens, of which `lack` says what it cannot do."""
        model = cls._find(name)
        if model.spec.num_labels:
            raise ConfigError(
                f"{name} has a classification head of {counted(model.spec.num_labels, 'label')} and {lack}", hint
            )
        if model.spec.bidirectional:
            raise ConfigError(f"{name} is not causal (each token sees those after it) and {lack}", hint)
        if model.spec.is_headless:
            raise ConfigError(f"{name} was saved without its head for tokens and {lack}", hint)
        return model

    @classmethod
    def find_scoring(cls, name: str) -> AnsweringModel:
        """A reward model. ConfigError for one that does not have one score."""
        model = cls._find(name)
        check_scores(name, model.spec)
        return model

    @classmethod
    def _find(cls, name: str) -> AnsweringModel:
        folder = Path(name) if Path(name).is_dir() else locate(name, "whole").path
        config = read_config(folder)
        return cls(folder, config, spec_from_config(config))


def check_scores(name: str, spec: ModelSpec) -> None:
    """ConfigError for a model that does not give a text one score."""
    if spec.num_labels != 1:
        has = (
            f"a classification head of {counted(spec.num_labels, 'label')}"
            if spec.num_labels
            else "no classification head"
        )
        raise ConfigError(
            f"{name} has {has}, and a reward model has one of 1 label",
            'train one with task = "reward", or take a ForSequenceClassification with num_labels = 1',
        )
    if spec.bidirectional:
        raise ConfigError(f"{name} is not causal (each token sees those after it)", "take a model that is")
