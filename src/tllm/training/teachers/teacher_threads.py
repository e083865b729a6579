"""Who answers the questions of a run: a model in this process, or teachers elsewhere; each in a thread of its own."""

from __future__ import annotations

import logging
import ssl
import threading
from collections import deque
from typing import Protocol

import numpy as np

from tllm.core.errors import AuthError, ClusterError, ConfigError, FrameError, LinkError, TllmError
from tllm.training.teachers.question_queue import AskedRow, QuestionQueue
from tllm.training.teachers.teacher_connection import TeacherConnection
from tllm.training.teachers.teacher_messages import Answer, Lesson
from tllm.training.teachers.teacher_model import TeacherModel

IN_FLIGHT = 4
"""Rows that a teacher elsewhere has been asked and has not answered: it computes one while others travel."""

RETRY_SECONDS = 0.5

log = logging.getLogger("tllm.train")


class TeacherThread(Protocol):
    """Takes questions until the queue is over. `trouble`: why it cannot, in words; "" where it can."""

    name: str
    trouble: str

    def start(self) -> None: ...

    def close(self) -> None: ...


class LocalTeacher:
    """A `TeacherThread` that computes in this process."""

    def __init__(self, teacher: TeacherModel, lesson: Lesson, queue: QuestionQueue) -> None:
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
                answer = checked(self._teacher.answer(asked.question, self._lesson), asked, self._lesson, self.name)
                self._queue.answer(asked, answer, 0)
        except TllmError as error:
            self._queue.fail(error)
        except RuntimeError as error:  # torch's, out of memory say: the run is to end with it, and not to wait
            self._queue.fail(ClusterError(f"the teacher {self.name} failed: {error}"))


class RemoteTeacher:
    """A `TeacherThread` that asks a teacher elsewhere, and dials it again for as long as it is lost.

    What a lost teacher was asked goes back to the queue, where it is the next that any teacher takes.
    """

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext, lesson: Lesson, queue: QuestionQueue) -> None:
        self.name, self.trouble = f"{address[0]}:{address[1]}", "not reached yet"
        self._address, self._context, self._lesson, self._queue = address, context, lesson, queue
        self._connection: TeacherConnection | None = None
        self._thread = threading.Thread(target=self._run, name=f"tllm-teacher {self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once the queue is over."""
        if (connection := self._connection) is not None:
            connection.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._queue.is_over:
            try:
                self._connection = TeacherConnection.dial(self._address, self._context)
            except LinkError as error:
                self.trouble = error.message
            except AuthError as error:
                self._queue.fail(error)
            else:
                self._teach_until_lost(self._connection)
            self._queue.pause(RETRY_SECONDS)

    def _teach_until_lost(self, connection: TeacherConnection) -> None:
        try:
            self._teach(connection)
        except FrameError as error:  # not what a teacher of this release says: dialling again would not help
            self._queue.fail(ClusterError(f"the teacher at {self.name}: {error.message}"))
        except LinkError:
            self.trouble = "the connection ended"
            if not self._queue.is_over:
                log.warning("the teacher at %s is lost; its rows are asked again", self.name)
        except (ConfigError, ClusterError) as error:
            self._queue.fail(error)
        finally:
            connection.close()

    def _teach(self, connection: TeacherConnection) -> None:
        greeting = connection.introduce(self._lesson)
        if greeting.refused:
            raise ConfigError(
                f"the teacher {greeting.model} at {self.name} cannot teach this student: {greeting.refused}", _HINT
            )
        log.info("the teacher at %s is %s", self.name, greeting.model)
        self.trouble = ""
        asked: deque[AskedRow] = deque()
        sent: deque[int] = deque()
        try:
            while True:
                while len(asked) < IN_FLIGHT and (row := self._queue.take(wait=not asked)) is not None:
                    asked.append(row)
                    sent.append(connection.send_question(row.question))
                if not asked:
                    return
                answer, received = connection.receive_answer()
                self._queue.answer(asked[0], checked(answer, asked[0], self._lesson, self.name), received + sent[0])
                asked.popleft()
                sent.popleft()
        finally:
            self._queue.give_back(asked)


def checked(answer: Answer, asked: AskedRow, lesson: Lesson, name: str) -> Answer:
    """The answer, if it is one to what was asked; ClusterError otherwise."""
    if answer.error:
        raise ClusterError(f"the teacher at {name} cannot answer: {answer.error}")
    places = len(asked.question.places) // 4
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
    want = asked.question.number, each * sent, 4 * (sent + places if lesson.top_k else places * lesson.width)
    got = answer.number, len(answer.ids), len(answer.log_probs)
    if got != want:
        raise ClusterError(
            f"the teacher at {name} answers row {got[0]} with {got[1]} bytes of tokens and {got[2]} of probabilities, "
            f"and row {want[0]} has {want[1]} and {want[2]}"
        )
    return answer


_HINT = "teacher and student must have the same tokens: take two models of one series"
