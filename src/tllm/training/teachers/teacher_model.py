"""`TeacherModel`: a whole model in this process that says how likely each next token of a row is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tllm.comm.collectives.group import solo
from tllm.core.errors import ConfigError, FrameError
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import whole
from tllm.parallel.top_log_probs import top_log_probs
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.questions.causal_model import CausalModel
from tllm.training.step.model_chunks import build_chunks
from tllm.training.teachers.hidden_states import TakenStates
from tllm.training.teachers.teacher_messages import Answer, Lesson, Question, unpacked
from tllm.training.teachers.top_k_choice import entropy, fewest_within, lost_by_count
from tllm.weights.byte_source import ByteSource, LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import load
from tllm.weights.manifest import checked

PLACES_AT_ONCE = 128
"""Tokens whose logits are in memory together."""


@dataclass(frozen=True)
class TeacherModel:
    """`name` is how it was asked for; `vocabulary` the digest of its tokens, which are in `folder` if that is known."""

    name: str
    spec: ModelSpec
    model: Transformer
    vocabulary: str
    folder: Path | None = None

    @classmethod
    def open(cls, name: str, dtype: str = "float32") -> TeacherModel:
        """The model of a folder, or by its name."""
        hint = "take a causal language model as the teacher"
        folder, config, _ = CausalModel.find(name, "gives no next token", hint)
        opened = cls.of(name, config, LocalFiles(folder), vocabulary_digest(folder), dtype)
        return replace(opened, folder=folder)

    @classmethod
    def of(cls, name: str, config: dict[str, Any], source: ByteSource, vocabulary: str, dtype: str) -> TeacherModel:
        """A model whose weights come from a source, be its files here or elsewhere."""
        spec, source = spec_from_config(config), checked(source)
        (model,) = build_chunks(spec, whole(spec), [range(spec.num_layers)], torch_dtype(dtype))
        load(model, open_index(source, config), source, torch_dtype(dtype))
        return cls(name, spec, model.requires_grad_(False), vocabulary)

    def refusal(self, lesson: Lesson) -> str:
        """Why this model cannot teach a student of these tokens, in words; "" where it can."""
        ours = self.spec.vocab_size
        if lesson.vocabulary != self.vocabulary:
            return (
                f"its {ours} tokens are not the student's {lesson.vocab_size}: the digests of the two tokenizers are "
                f"{self.vocabulary or 'none'} and {lesson.vocabulary or 'none'}"
            )
        if not lesson.top_k and lesson.vocab_size != ours:
            return f"it has {ours} tokens and the student {lesson.vocab_size}, and top_k = 0 asks for all of them"
        if lesson.top_k >= min(lesson.vocab_size, ours):
            return f"top_k is {lesson.top_k} and teacher and student share {min(lesson.vocab_size, ours)} tokens"
        if lesson.hidden_states and lesson.hidden_size != self.spec.hidden_size:
            return (
                f"its hidden_size is {self.spec.hidden_size} and distill.teacher_hidden_size, to which the run "
                f"projects, is {lesson.hidden_size}"
            )
        layers = self.spec.num_layers
        for number in lesson.hidden_states:
            if self.spec.hidden_state(number) is None:
                return (
                    f"distill.hidden_state_layers names the teacher's hidden state {number} and it has {layers} "
                    f"layers, so 0 to {layers}, or -1 to {-layers - 1} from the end"
                )
        return ""

    def open_session(self, lesson: Lesson) -> TeacherSession:
        """What answers one run. ConfigError for a student that this model cannot teach."""
        if reason := self.refusal(lesson):
            raise ConfigError(reason)
        return TeacherSession(self, lesson)

    @torch.inference_mode()
    def answer(self, question: Question, lesson: Lesson) -> Answer:
        """The log-probabilities that are asked for. FrameError for a question that is not one."""
        ids, places = unpacked(question.ids), unpacked(question.places)
        _check(ids, places, question.lengths, self.spec.vocab_size)
        positions = np.concatenate([np.arange(length) for length in question.lengths])
        row = PackedRow(0, ids, np.full_like(ids, IGNORED), positions, question.lengths, ())
        tokens = tokens_of([row])
        attend = TrainAttend(self.model.attention_specs(), tokens)
        places_P = torch.from_numpy(places)
        states = TakenStates(lesson, self.model, places_P)
        x_TD = self.model(tokens.ids_T, tokens.positions_T, attend, tokens.lengths_T, observe=states)[places_P]
        states.take_last(x_TD)
        known = min(lesson.vocab_size, self.spec.vocab_size)
        found_ids, found, lost = [], [], []
        for x_PD in x_TD.split(PLACES_AT_ONCE):
            logits_PV = self.model.logits(x_PD)[:, :known] / lesson.temperature
            if not lesson.top_k:
                found.append(logits_PV.log_softmax(-1))
                continue
            ids_PK, log_p_PB = top_log_probs(logits_PV, lesson.top_k, (0, known), solo())
            found_ids.append(ids_PK)
            found.append(log_p_PB)
            if lesson.kl_budget:  # the logits of the K are -inf now
                lost.append(lost_by_count(log_p_PB, entropy(logits_PV), known))
        log_p_PB = torch.cat(found)
        if not torch.isfinite(log_p_PB).all():
            reason = f"the teacher {self.name} gives log-probabilities that are not finite"
            return Answer(question.number, error=reason)
        hidden_states = states.encoded()
        if hidden_states is None:
            return Answer(question.number, error=f"the teacher {self.name} gives hidden states that are not finite")
        if lost:
            answer = _within_budget(question.number, torch.cat(found_ids), log_p_PB, torch.cat(lost), lesson)
            return msgspec.structs.replace(answer, hidden_states=hidden_states)
        sent = torch.cat(found_ids).numpy().astype(lesson.id_type).tobytes() if found_ids else b""
        return Answer(question.number, sent, _floats(log_p_PB), hidden_states=hidden_states)


@dataclass(frozen=True)
class TeacherSession:
    """A teacher and what one run wants of it."""

    teacher: TeacherModel
    lesson: Lesson

    def answer(self, question: Question) -> Answer:
        return self.teacher.answer(question, self.lesson)

    def failed(self, question: Question, reason: str) -> Answer:
        return Answer(question.number, error=reason)

    def close(self) -> None:
        """Nothing is held for one run."""


def _within_budget(number: int, ids_PK: Tensor, log_p_PB: Tensor, lost_PK: Tensor, lesson: Lesson) -> Answer:
    """The likeliest tokens of each place, as many as the budget wants, and all others together."""
    counts_P = fewest_within(lost_PK, lesson.kl_budget)
    columns_B = torch.arange(log_p_PB.shape[-1])
    is_sent_PB = columns_B < counts_P[:, None]
    rest_P1 = log_p_PB.masked_fill(is_sent_PB, -torch.inf).logsumexp(-1, keepdim=True)
    sent_PB = torch.where(is_sent_PB, log_p_PB, rest_P1)[columns_B <= counts_P[:, None]]
    lost = float(lost_PK.gather(-1, counts_P[:, None] - 1).sum())
    ids = ids_PK[is_sent_PB[:, :-1]].numpy().astype(lesson.id_type).tobytes()
    return Answer(number, ids, _floats(sent_PB), counts=counts_P.numpy().astype("<u2").tobytes(), lost=lost)


def _floats(x: Tensor) -> bytes:
    return x.float().numpy().astype("<f4").tobytes()


def _check(ids: NDArray[np.int64], places: NDArray[np.int64], lengths: tuple[int, ...], vocab_size: int) -> None:
    if not len(places) or not lengths or min(lengths) < 1 or sum(lengths) != len(ids):
        raise FrameError(f"a row of {len(ids)} tokens in documents of {lengths[:8]}, {len(places)} places asked for")
    for name, numbers, limit in (("token", ids, vocab_size), ("place", places, len(ids))):
        if numbers.min() < 0 or numbers.max() >= limit:
            worst = int(numbers.max() if numbers.max() >= limit else numbers.min())
            raise FrameError(f"{name} {worst} of a row, which must be less than {limit}")
