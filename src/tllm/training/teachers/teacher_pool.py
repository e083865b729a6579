"""`TeacherPool`: the teachers of a run. Each is asked for a row at a time, and answers with numbers of its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tllm.cluster.tls import data_client
from tllm.core.errors import counted
from tllm.parallel.divergence import NO_TOKEN
from tllm.text.same_vocabulary import check_same_vocabulary, vocabulary_digest
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job import Job
from tllm.training.job.key_limits import address_of
from tllm.training.objectives.distillation import BYTES, IDS, LOG_PROBS, LOST
from tllm.training.questions.answerer_pool import AnswererPool, ClusterAnswerers, NamedAnswerers
from tllm.training.questions.remote_answerer import NOBODY, AnsweringThread, wait_for
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.questions.waiting_ranks import Still, nobody
from tllm.training.teachers.coded_log_probs import log_probs_of, normalised
from tllm.training.teachers.hidden_states import states_of_tokens
from tllm.training.teachers.teacher_messages import (
    Answer,
    HiddenStateDtype,
    Lesson,
    LogProbDtype,
    Question,
    packed,
)
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.training.teachers.teacher_threads import AskedRow, LocalTeacher, TeacherInquirer, TeacherQueue

Numbers = NDArray[Any]

log = logging.getLogger("tllm.train")


class TeacherPool:
    """Whichever teacher is free computes the next row, alone, so that what it finds hangs on the row and on nothing
    else. Those among `teachers` may change; they have been started. Whoever waits for them calls `still`.
    """

    def __init__(
        self, lesson: Lesson, queue: TeacherQueue, teachers: Iterable[AnsweringThread], still: Still = nobody
    ) -> None:
        self._lesson, self._queue, self._teachers, self._still = lesson, queue, teachers, still
        self._number = 0
        self._has_warned = False

    @classmethod
    def open(
        cls,
        job: Job,
        beginning: InitialModel,
        cluster: ClusterAnswerers | None,
        stop: StopSignal,
        still: Still = nobody,
    ) -> TeacherPool:
        """Those that a job names. ConfigError where teacher and student do not fit each other."""
        keys = job.distill
        assert keys is not None, "asked for where a teacher is named"
        spec, queue = beginning.spec, TeacherQueue("teacher", stop)
        lesson = Lesson(
            keys.top_k,
            keys.temperature,
            spec.vocab_size,
            vocabulary_digest(beginning.folder),
            keys.kl_budget,
            keys.teacher_hidden_states,
            keys.teacher_hidden_size or 0,
            msgspec.convert(keys.hidden_state_dtype, HiddenStateDtype),
            msgspec.convert(keys.log_prob_dtype, LogProbDtype),
            job.deterministic,
        )
        if keys.teacher_nodes:
            assert cluster is not None, "checked when the run began"
            return cls(lesson, queue, AnswererPool.of("teacher", cluster, TeacherInquirer(lesson), queue), still)
        is_here = bool(keys.teacher_model_name_or_path)  # and if it hangs, so does rank 0
        return cls(lesson, queue, _teachers(keys, lesson, queue, beginning), nobody if is_here else still)

    def ask(self, row: PackedRow) -> AskedRow | None:
        """Let a row wait for a teacher; None where nothing of it is learned."""
        places = np.flatnonzero(row.labels != IGNORED)
        if not len(places):
            return None
        self._number += 1
        return self._queue.ask(Question(self._number, packed(row.input_ids), row.lengths, packed(places)))

    def taught(
        self, row: PackedRow, asked: AskedRow | None, step: int, on_wait: Callable[[str], object] = lambda reason: None
    ) -> PackedRow:
        """The row with what a teacher says of each token, once it has; `on_wait` hears now and then for whom it waits.

        ConfigError where no teacher can answer (`wait_for`).
        """
        answer, nbytes = (Answer(0), 0) if asked is None else self._wait_for(asked, step, on_wait)
        places, tokens = np.flatnonzero(row.labels != IGNORED), len(row.labels)
        ids, log_probs = places_of(answer, len(places), self._lesson)
        of_tokens = {**row.of_tokens, LOG_PROBS: np.zeros((tokens, self._lesson.width), dtype="<f4")}
        of_tokens[LOG_PROBS][places] = log_probs
        if self._lesson.top_k:
            of_tokens[IDS] = np.zeros((tokens, self._lesson.top_k), dtype="<i4")
            of_tokens[IDS][places] = ids
        of_tokens |= states_of_tokens(answer, self._lesson, places, tokens)
        told: dict[str, float] = {BYTES: nbytes}
        if self._lesson.kl_budget:
            told[LOST] = answer.lost
            self._warn(step, answer.lost / max(len(places), 1))
        documents = len(row.lengths)
        shares = {name: np.full(documents, number / documents, dtype="<f8") for name, number in told.items()}
        return replace(row, of_tokens=of_tokens, of_documents={**row.of_documents, **shares})

    def waits_for(self) -> str:
        """The teachers, with what is the matter with each; "" where nobody waits for them."""
        if not self._queue.unanswered:
            return ""
        each = ", ".join(f"{teacher.name} ({teacher.trouble or 'computing'})" for teacher in self._teachers)
        return f"{counted(self._queue.unanswered, 'row')} of the teachers {each or NOBODY}"

    def interrupt(self) -> None:
        """Whoever waits for a teacher gets an error."""
        self._queue.close()

    def close(self) -> None:
        """End the threads."""
        self._queue.close()
        for teacher in self._teachers:
            teacher.close()

    def _warn(self, step: int, lost: float) -> None:
        """Once, where `top_k` tokens of each place lose more than the budget."""
        if self._has_warned or lost <= self._lesson.kl_budget * (1 + 1e-9):  # a sum is rounded, and so is a mean
            return
        self._has_warned = True
        log.warning(
            "step %d: %d tokens of each place lose %.4f nats a token of what the teacher says, and kl_budget is %g: "
            "raise distill.top_k to hold it",
            *(step + 1, self._lesson.top_k, lost, self._lesson.kl_budget),
        )

    def _wait_for(self, asked: AskedRow, step: int, on_wait: Callable[[str], object]) -> tuple[Answer, int]:
        stop, still = self._queue.stop, self._still
        return wait_for(asked, self._teachers, f"step {step + 1}", self.waits_for, on_wait, stop, still)


def places_of(answer: Answer, places: int, lesson: Lesson) -> tuple[Numbers, Numbers]:
    """The ids and log-probabilities of each place, [places, top_k] and [places, width]: -1 and -inf for tokens that a
    budget left out."""
    numbers = np.frombuffer(answer.ids, lesson.id_type)
    if lesson.is_coded:
        log_probs: Numbers = log_probs_of(np.frombuffer(answer.log_probs, np.uint8))
    else:
        log_probs = np.frombuffer(answer.log_probs, "<f4")
    if not lesson.kl_budget:
        return numbers.reshape(places, lesson.top_k), log_probs.reshape(places, lesson.width)
    is_sent = np.arange(lesson.width) < answer.token_counts[:, None]
    ids = np.full((places, lesson.top_k), NO_TOKEN, dtype="<i4")
    ids[is_sent[:, :-1]] = numbers
    spread = np.full((places, lesson.width), -np.inf, dtype="<f4")
    if lesson.is_coded:
        spread[is_sent] = log_probs
        spread[:, -1] = np.frombuffer(answer.rests, "<f4")
        return ids, normalised(spread)
    is_sent[:, -1] = True  # the rest
    spread[is_sent] = log_probs
    return ids, spread


def _teachers(
    keys: DistillationKeys, lesson: Lesson, queue: TeacherQueue, beginning: InitialModel
) -> Iterable[AnsweringThread]:
    if keys.teacher_model_name_or_path:
        teacher = TeacherModel.open(keys.teacher_model_name_or_path, keys.teacher_dtype)
        sizes = beginning.spec.vocab_size, teacher.spec.vocab_size
        assert teacher.folder is not None, "it was opened there"
        check_same_vocabulary(beginning.folder, teacher.folder, *sizes, "teacher")
        compared = msgspec.structs.replace(lesson, vocabulary=teacher.vocabulary)  # token by token: padding may differ
        beside = LocalTeacher(teacher, compared, queue)
        beside.start()
        return [beside]
    addresses, context = named_teachers(keys)
    return AnswererPool.at(addresses, TeacherInquirer(lesson), queue, context)


def named_teachers(keys: DistillationKeys) -> NamedAnswerers:
    """Those whose addresses a job gives. ConfigError for what is no address, AuthError for a secret that is none."""
    context = data_client(shared_identity(Path(keys.teacher_secret), "student", "tllm teach"))
    return NamedAnswerers([address_of(text, "distill.teachers") for text in keys.teachers], context)
