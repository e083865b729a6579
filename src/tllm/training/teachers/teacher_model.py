"""`TeacherModel`: a model, whole or a rank's part of it, that gives the probabilities of each next token of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tllm.comm.collectives.group import solo
from tllm.core.errors import ConfigError, FrameError, decoded
from tllm.parallel.top_log_probs import top_log_probs
from tllm.spec.model_spec import ModelSpec
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.job.distillation_keys import CODES_LOSE
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.questions.run_connection import ANSWER_LIMIT
from tllm.training.questions.stateless_session import StatelessSession
from tllm.training.step.frozen_model import FrozenModel
from tllm.training.step.pass_threads import same_bits, unlike_bits
from tllm.training.teachers.coded_log_probs import codes_of, log_probs_of, normalised
from tllm.training.teachers.hidden_states import TakenStates
from tllm.training.teachers.teacher_messages import Answer, Lesson, Question, unpacked
from tllm.training.teachers.top_k_choice import entropy, fewest_within, lost_by_count
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import Progress

PLACES_AT_ONCE = 128
"""Tokens whose logits are in memory together."""


class PartOfAnswer(msgspec.Struct, frozen=True):
    """What one rank has found: the answer, where it has the last layer; hidden states, None where one is not finite."""

    answer: Answer | None = None
    states: dict[int, bytes] | None = {}


PARTS = msgspec.msgpack.Decoder(PartOfAnswer)


@dataclass(frozen=True)
class TeacherModel:
    """`name` is how it was asked for; `vocabulary` the digest of its tokens, which are in `folder` if that is known."""

    name: str
    part: FrozenModel
    vocabulary: str
    folder: Path | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.part.spec

    @classmethod
    def open(cls, name: str, dtype: str = "float32", progress: Progress | None = None) -> TeacherModel:
        """The model of a folder, or by its name. `progress` hears of the bytes that are read."""
        hint = "take a causal language model as the teacher"
        folder, config, _ = AnsweringModel.find_causal(name, "gives no next token", hint)
        vocabulary = vocabulary_digest(folder)  # before weights are read: it may refuse the tokenizer
        part = FrozenModel.load(config, LocalFiles(folder), dtype, progress=progress)
        return cls(name, part, vocabulary, folder)

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
        return unlike_bits(self.part.plan, lesson.deterministic)

    def open_session(self, lesson: Lesson) -> StatelessSession[Question, Answer]:
        """What answers one run. ConfigError for a student that this model cannot teach."""
        if reason := self.refusal(lesson):
            raise ConfigError(reason)
        return StatelessSession(self.check, partial(self.answer, lesson=lesson), _failed)

    def check(self, question: Question) -> None:
        """FrameError for a question that is not one."""
        _check(unpacked(question.ids), unpacked(question.places), question.lengths, self.spec.vocab_size)

    @torch.inference_mode()
    def answer(self, question: Question, lesson: Lesson) -> Answer:
        """The log-probabilities that are asked for; on ranks that are not the first without any. FrameError for a
        question that is not one."""
        self.check(question)
        with same_bits(lesson.deterministic):
            return self._answer(question, lesson)

    def _answer(self, question: Question, lesson: Lesson) -> Answer:
        ids, places = unpacked(question.ids), unpacked(question.places)
        positions = np.concatenate([np.arange(length) for length in question.lengths])
        row = PackedRow(0, ids, np.full_like(ids, IGNORED), positions, question.lengths, ())
        places_P = torch.from_numpy(places)
        states = TakenStates(lesson, self.part.model, places_P)
        x_TD, said = self.part(row, states), None
        if x_TD is not None:
            states.take_last(x_TD[places_P])
            said = self._said(question.number, x_TD[places_P], lesson)
        found = PartOfAnswer(said, states.encoded()) if self.part.tells else PartOfAnswer()
        if not self.part.is_cut:
            return self._joined([found], lesson)
        every = self.part.gathered(msgspec.msgpack.encode(found), ANSWER_LIMIT)
        return self._joined([decoded(one, PARTS) for one in every], lesson) if every else Answer(question.number)

    def _joined(self, parts: Sequence[PartOfAnswer], lesson: Lesson) -> Answer:
        """The answer, with the hidden states of all ranks."""
        (answer,) = [part.answer for part in parts if part.answer is not None]
        if answer.error:
            return answer
        states = dict[int, bytes]()
        for part in parts:
            if part.states is None:
                return Answer(answer.number, error=f"the teacher {self.name} gives hidden states that are not finite")
            states |= part.states
        return msgspec.structs.replace(
            answer, hidden_states=b"".join(states[number] for number in lesson.hidden_states)
        )

    def _said(self, number: int, x_TD: Tensor, lesson: Lesson) -> Answer:
        """Of the last layer's rows at the places."""
        known = min(lesson.vocab_size, self.spec.vocab_size)
        found_ids, found, lost = [], [], []
        for x_PD in torch.split(x_TD, PLACES_AT_ONCE):
            logits_PV = self.part.logits(x_PD)[:, :known] / lesson.temperature
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
            return Answer(number, error=reason)
        if lost:
            return _within_budget(number, torch.cat(found_ids), log_p_PB, torch.cat(lost), lesson)
        sent = torch.cat(found_ids).numpy().astype(lesson.id_type).tobytes() if found_ids else b""
        return Answer(number, sent, _floats(log_p_PB))


def _failed(question: Question, reason: str) -> Answer:
    return Answer(question.number, error=reason)


def _within_budget(number: int, ids_PK: Tensor, log_p_PB: Tensor, lost_PK: Tensor, lesson: Lesson) -> Answer:
    """The likeliest tokens of each place, as many as the budget wants, and all others together."""
    budget = lesson.kl_budget - CODES_LOSE if lesson.is_coded else lesson.kl_budget
    counts_P = fewest_within(lost_PK, budget)
    columns_B = torch.arange(log_p_PB.shape[-1])
    is_sent_PB = columns_B < counts_P[:, None]
    rest_P1 = log_p_PB.masked_fill(is_sent_PB, -torch.inf).logsumexp(-1, keepdim=True)
    lost = float(lost_PK.gather(-1, counts_P[:, None] - 1).sum())
    ids = ids_PK[is_sent_PB[:, :-1]].numpy().astype(lesson.id_type).tobytes()
    counts = counts_P.numpy().astype("<u2").tobytes()
    if lesson.is_coded:
        top_PK = log_p_PB.masked_fill(~is_sent_PB, -torch.inf)[:, :-1]
        codes, by_codes = _coded(torch.cat((top_PK, rest_P1), -1).double().numpy(), is_sent_PB[:, :-1].numpy())
        return Answer(number, ids, codes, counts=counts, lost=lost + by_codes, rests=_floats(rest_P1))
    sent_PB = torch.where(is_sent_PB, log_p_PB, rest_P1)[columns_B <= counts_P[:, None]]
    return Answer(number, ids, _floats(sent_PB), counts=counts, lost=lost)


def _coded(log_p_PB: NDArray[Any], is_sent_PK: NDArray[np.bool_]) -> tuple[bytes, float]:
    """The codes of the tokens that are sent, and the nats that they lose; others are -inf, the rest is last."""
    codes = codes_of(log_p_PB[:, :-1][is_sent_PK])
    told_PB = log_p_PB.copy()
    told_PB[:, :-1][is_sent_PK] = log_probs_of(codes)
    p_PB, told_PB = np.exp(log_p_PB), normalised(told_PB)
    differences_PB = np.subtract(log_p_PB, told_PB, out=np.zeros_like(told_PB), where=p_PB > 0)
    return codes.tobytes(), max(0.0, float((p_PB * differences_PB).sum()))


def _floats(x: Tensor) -> bytes:
    return x.float().numpy().astype("<f4").tobytes()


def _check(ids: NDArray[np.int64], places: NDArray[np.int64], lengths: tuple[int, ...], vocab_size: int) -> None:
    if not len(places) or not lengths or min(lengths) < 1 or sum(lengths) != len(ids):
        raise FrameError(f"a row of {len(ids)} tokens in documents of {lengths[:8]}, {len(places)} places asked for")
    for name, numbers, limit in (("token", ids, vocab_size), ("place", places, len(ids))):
        if numbers.min() < 0 or numbers.max() >= limit:
            worst = int(numbers.max() if numbers.max() >= limit else numbers.min())
            raise FrameError(f"{name} {worst} of a row, which must be less than {limit}")
