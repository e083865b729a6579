"""Threads that answer a run's questions to teachers: by a model in this process, or by a teacher elsewhere."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from tllm.core.errors import ClusterError, ConfigError, TllmError
from tllm.training.questions.question_queue import Asked, QuestionQueue
from tllm.training.questions.question_server import FAULTS, reason_of
from tllm.training.questions.run_connection import RunConnection
from tllm.training.teachers.teacher_messages import TEACHING, Answer, Lesson, Question
from tllm.training.teachers.teacher_model import TeacherModel

IN_FLIGHT = 4
"""Rows that a teacher elsewhere has been asked and has not answered: it computes one while others travel."""

AskedRow = Asked[Question, Answer]
TeacherQueue = QuestionQueue[Question, Answer]
TeacherConnection = RunConnection[Lesson, Question, Answer]


class LocalTeacher:
    """An `AnsweringThread` that computes in this process."""

    bytes_read = 0

    def __init__(self, teacher: TeacherModel, lesson: Lesson, queue: TeacherQueue) -> None:
        if reason := teacher.refusal(lesson):
            raise ConfigError(f"{teacher.name} cannot teach this student: {reason}", _HINT)
        self.name, self.trouble = teacher.name, ""
        self._teacher, self._lesson, self._queue = teacher, lesson, queue
        self._thread = threading.Thread(target=self._run, name="tllm-teacher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once the queue is over."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (asked := self._queue.take()) is not None:
                answer = self._teacher.answer(asked.question, self._lesson)
                self._queue.answer(asked, checked(answer, asked.question, self._lesson, self.name), 0)
        except TllmError as error:
            self._queue.fail(error)
        except FAULTS as error:
            self._queue.fail(ClusterError(f"the teacher {self.name} cannot answer: {reason_of(error)}"))


@dataclass(frozen=True)
class TeacherInquirer:
    """What a run says to each of its teachers elsewhere."""

    lesson: Lesson
    conversation = TEACHING
    in_flight = IN_FLIGHT

    @property
    def introduction(self) -> Lesson:
        return self.lesson

    def send(self, connection: TeacherConnection, question: Question, name: str) -> int:
        return connection.send_question(question)

    def checked(self, answer: Answer, question: Question, name: str) -> Answer:
        return checked(answer, question, self.lesson, name)

    def refused(self, model: str, name: str, reason: str) -> ConfigError:
        return ConfigError(f"the teacher {model} at {name} cannot teach this student: {reason}", _HINT)


def checked(answer: Answer, question: Question, lesson: Lesson, name: str) -> Answer:
    """The answer, if it is one to what was asked; ClusterError otherwise."""
    if answer.error:
        raise ClusterError(f"the teacher at {name} cannot answer: {answer.error}")
    places = len(question.places) // 4
    sent = places * lesson.top_k
    if lesson.kl_budget:
        counts = answer.token_counts
        if len(counts) != places or not ((counts > 0) & (counts <= lesson.top_k)).all() or not answer.lost >= 0:
            raise ClusterError(
                f"the teacher at {name} says that it sends {counts.tolist()[:8]} tokens of {places} places and loses "
                f"{answer.lost} nats, and each place has 1 to {lesson.top_k}"
            )
        sent = int(counts.sum())
    each = np.dtype(lesson.id_type).itemsize
    numbers = sent + places if lesson.top_k else places * lesson.width
    log_probs, rests = (sent, 4 * places) if lesson.is_coded else (4 * numbers, 0)
    want = question.number, each * sent, log_probs, rests
    got = answer.number, len(answer.ids), len(answer.log_probs), len(answer.rests)
    if got != want:
        raise ClusterError(
            f"the teacher at {name} answers row {got[0]} with {got[1]} bytes of tokens, {got[2]} of probabilities and "
            f"{got[3]} of rests, and row {want[0]} has {want[1]}, {want[2]} and {want[3]}",
            "its tllm knows no log_prob_dtype: install this version there too" if rests and not answer.rests else "",
        )
    asked = places * lesson.hidden_state_bytes
    if asked and not answer.hidden_states:
        raise ClusterError(
            f"the teacher at {name} answers without the {len(lesson.hidden_states)} hidden states that were asked for",
            "its tllm knows none: install this version there too",
        )
    if len(answer.hidden_states) != asked:
        raise ClusterError(
            f"the teacher at {name} answers row {got[0]} with {len(answer.hidden_states)} bytes of hidden states, "
            f"which has {asked}"
        )
    return answer


_HINT = (
    "teacher and student must have the same tokens: take two models of one series; [distill] says what is asked of it"
)
