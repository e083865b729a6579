"""`RewardModel`: a whole model with one label in this process, which scores texts by their last token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tllm.core.errors import ConfigError, FrameError
from tllm.hub.locate import locate
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import whole
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.reward_models.reward_messages import ScoringRun, TextScore, TextToScore
from tllm.training.step.model_chunks import build_chunks
from tllm.weights.byte_source import ByteSource, LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load
from tllm.weights.manifest import checked


class ScoringModel(NamedTuple):
    """A reward model's folder, and what `config.json` there says. No weights yet."""

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec

    @classmethod
    def find(cls, name: str) -> ScoringModel:
        """By its folder or its name. ConfigError for one that does not have one score."""
        folder = Path(name) if Path(name).is_dir() else locate(name, "whole").path
        config = read_config(folder)
        spec = spec_from_config(config)
        if spec.num_labels != 1:
            has = f"a classification head of {spec.num_labels} labels" if spec.num_labels else "no classification head"
            raise ConfigError(
                f"{name} has {has}, and a reward model has one of 1 label",
                'train one with task = "reward", or take a ForSequenceClassification with num_labels = 1',
            )
        return cls(folder, config, spec)


@dataclass(frozen=True)
class RewardModel:
    """`name` is how it was asked for. Each text is computed alone, so that its score hangs on nothing else."""

    name: str
    spec: ModelSpec
    model: Transformer

    @classmethod
    def of(cls, name: str, config: dict[str, Any], source: ByteSource, dtype: str) -> RewardModel:
        """A model whose weights come from a source, be its files here or elsewhere."""
        spec, source = spec_from_config(config), checked(source)
        (model,) = build_chunks(spec, whole(spec), [range(spec.num_layers)], torch_dtype(dtype))
        load(model, open_index(source, config), source, torch_dtype(dtype))
        return cls(name, spec, model.requires_grad_(False))

    @classmethod
    def open(cls, name: str, found: ScoringModel, dtype: str) -> RewardModel:
        """The model of a folder on this machine."""
        return cls.of(name, found.config, LocalFiles(found.folder), dtype)

    def open_session(self, run: ScoringRun) -> RewardSession:
        """What answers one run. ConfigError for one that knows other tokens."""
        if run.vocab_size != self.spec.vocab_size:
            raise ConfigError(f"it has {self.spec.vocab_size} tokens and the run sends those of {run.vocab_size}")
        return RewardSession(self)

    @torch.inference_mode()
    def answer(self, question: TextToScore) -> TextScore:
        """The score of a text. FrameError for a question that is not one."""
        if not question.ids or len(question.ids) % 4:
            raise FrameError(f"{len(question.ids)} bytes of tokens of 4 bytes each")
        ids = np.frombuffer(question.ids, dtype="<i4").astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.spec.vocab_size or len(ids) > self.spec.max_model_len:
            raise FrameError(
                f"a text of {len(ids)} tokens from {ids.min()} to {ids.max()}, where the model has "
                f"{self.spec.vocab_size} and its context {self.spec.max_model_len}"
            )
        row = PackedRow(0, ids, np.full_like(ids, IGNORED), np.arange(len(ids)), (len(ids),), ())
        tokens = tokens_of([row])
        attend = TrainAttend(self.model.attention_specs(), tokens)
        x_TD = self.model(tokens.ids_T, tokens.positions_T, attend, tokens.lengths_T)
        score = float(self.model.scores(x_TD[-1:])[0, 0])
        if not math.isfinite(score):
            return TextScore(question.number, error=f"the reward model {self.name} gives the score {score}")
        return TextScore(question.number, score)


@dataclass(frozen=True)
class RewardSession:
    """A reward model, for one run."""

    model: RewardModel

    def answer(self, question: TextToScore) -> TextScore:
        return self.model.answer(question)

    def failed(self, question: TextToScore, reason: str) -> TextScore:
        return TextScore(question.number, error=reason)

    def close(self) -> None:
        """Nothing is held for one run."""
