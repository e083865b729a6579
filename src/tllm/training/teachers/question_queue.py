"""`QuestionQueue`: rows that wait for a teacher, of whom several take them in turn. No row is ever lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tllm.core.errors import ClusterError, TllmError
from tllm.training.teachers.teacher_messages import Answer, Question


@dataclass(frozen=True, eq=False)
class AskedRow:
    """A question, and where its answer and the bytes on the wire that it took will be."""

    question: Question
    answered: Future[tuple[Answer, int]] = field(default_factory=Future)


class QuestionQueue:
    """Questions in order, each answered by whichever teacher takes it. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[AskedRow] = deque()
        self._unanswered: set[AskedRow] = set()
        self._error: TllmError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will be answered any more."""
        return self._error is not None

    @property
    def unanswered(self) -> int:
        """Rows that were asked and are not answered, taken by a teacher or not."""
        return len(self._unanswered)

    def ask(self, question: Question) -> AskedRow:
        """Let it wait for the next teacher that is free."""
        asked = AskedRow(question)
        with self._changed:
            if self._error is not None:
                asked.answered.set_exception(self._error)
                return asked
            self._unanswered.add(asked)
            self._waiting.append(asked)
            self._changed.notify_all()
        return asked

    def take(self, wait: bool = True) -> AskedRow | None:
        """The next question; None when there is none and nobody is to `wait`, or the queue is over."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self.is_over)
            return self._waiting.popleft() if self._waiting and not self.is_over else None

    def give_back(self, rows: Sequence[AskedRow]) -> None:
        """A teacher that took them was lost: they are the next again."""
        with self._changed:
            self._waiting.extendleft(reversed(rows))
            self._changed.notify_all()

    def answer(self, asked: AskedRow, answer: Answer, nbytes: int) -> None:
        """What a teacher found; nothing where the queue is over meanwhile."""
        with self._changed:
            if asked in self._unanswered:
                self._unanswered.remove(asked)
                asked.answered.set_result((answer, nbytes))

    def fail(self, error: TllmError) -> None:
        """Everybody who waits, now or later, gets this error: the first that is told."""
        with self._changed:
            self._error = self._error or error
            for asked in self._unanswered:
                asked.answered.set_exception(self._error)
            self._unanswered.clear()
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        self.fail(ClusterError("the run ended while it waited for a teacher"))

    def pause(self, seconds: float) -> None:
        """Wait, or return early when the queue is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, seconds)
