"""`RewardModel`: a model with one label, whole or a rank's part of it, which scores a text by its last token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tllm.core.errors import ConfigError, FrameError, decoded
from tllm.spec.model_spec import ModelSpec
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.questions.run_connection import ANSWER_LIMIT
from tllm.training.questions.stateless_session import StatelessSession
from tllm.training.reward_models.reward_messages import ScoringRun, TextScore, TextToScore
from tllm.training.step.frozen_model import FrozenModel
from tllm.training.step.pass_threads import same_bits, unlike_bits
from tllm.weights.byte_source import ByteSource, LocalFiles

_SAID: msgspec.msgpack.Decoder[TextScore | None] = msgspec.msgpack.Decoder(TextScore | None)


@dataclass(frozen=True)
class RewardModel:
    """`name` is how it was asked for. Each text is computed alone, so that its score hangs on nothing else."""

    name: str
    part: FrozenModel

    @property
    def spec(self) -> ModelSpec:
        return self.part.spec

    @classmethod
    def of(cls, name: str, config: dict[str, Any], source: ByteSource, dtype: str) -> RewardModel:
        """A whole model whose weights come from a source, be its files here or elsewhere."""
        return cls(name, FrozenModel.load(config, source, dtype))

    @classmethod
    def open(cls, name: str, found: AnsweringModel, dtype: str) -> RewardModel:
        """The model of a folder on this machine."""
        return cls.of(name, found.config, LocalFiles(found.folder), dtype)

    def refusal(self, run: ScoringRun) -> str:
        """Why this model cannot score for the run, in words; "" where it can."""
        if run.vocab_size != self.spec.vocab_size:
            return f"it has {self.spec.vocab_size} tokens and the run sends those of {run.vocab_size}"
        return unlike_bits(self.part.plan, run.deterministic)

    def open_session(self, run: ScoringRun) -> StatelessSession[TextToScore, TextScore]:
        """What answers one run. ConfigError for one that knows other tokens."""
        if reason := self.refusal(run):
            raise ConfigError(reason)
        return StatelessSession(self.check, partial(self.answer, deterministic=run.deterministic), _failed)

    def check(self, question: TextToScore) -> None:
        """FrameError for a question that is not one."""
        if not question.ids or len(question.ids) % 4:
            raise FrameError(f"{len(question.ids)} bytes of tokens of 4 bytes each")
        ids = np.frombuffer(question.ids, dtype="<i4").astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.spec.vocab_size or len(ids) > self.spec.max_model_len:
            raise FrameError(
                f"a text of {len(ids)} tokens from {ids.min()} to {ids.max()}, where the model has "
                f"{self.spec.vocab_size} and its context {self.spec.max_model_len}"
            )

    @torch.inference_mode()
    def answer(self, question: TextToScore, deterministic: bool = False) -> TextScore:
        """The score of a text; on ranks that are not the first without it. FrameError for a question that is not
        one."""
        self.check(question)
        with same_bits(deterministic):
            return self._answer(question)

    def _answer(self, question: TextToScore) -> TextScore:
        ids = np.frombuffer(question.ids, dtype="<i4").astype(np.int64)
        x_TD = self.part(PackedRow(0, ids, np.full_like(ids, IGNORED), np.arange(len(ids)), (len(ids),), ()))
        said = None if x_TD is None else self._said(question.number, x_TD)
        if not self.part.is_cut:
            assert said is not None, "the whole model is here"
            return said
        told = msgspec.msgpack.encode(said if self.part.tells else None)
        every = [decoded(one, _SAID) for one in self.part.gathered(told, ANSWER_LIMIT)]
        return next((one for one in every if one is not None), TextScore(question.number))

    def _said(self, number: int, x_TD: Tensor) -> TextScore:
        score = float(self.part.model.scores(x_TD[-1:])[0, 0])
        if not math.isfinite(score):
            return TextScore(number, error=f"the reward model {self.name} gives the score {score}")
        return TextScore(number, score)


def _failed(text: TextToScore, reason: str) -> TextScore:
    return TextScore(text.number, error=reason)
