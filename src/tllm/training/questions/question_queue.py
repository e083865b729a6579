"""`QuestionQueue`: a queue of questions for several programs. Each takes the next when it is free, and none is lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from tllm.core.errors import ClusterError, TllmError
from tllm.training.questions.stop_signal import StopSignal

MOST_LOSSES = 10
"""Of those who had one question: many more than a run meets by chance."""

Q = TypeVar("Q")
A = TypeVar("A")


class Asked(Generic[Q, A]):
    """A question, and where its answer and the bytes on the wire that it took will be.

    `seconds`: how long whoever answered it had it. `times_given_back`: how many were lost with it before.
    """

    def __init__(self, question: Q) -> None:
        self.question = question
        self.answered: Future[tuple[A, int]] = Future()
        self.taken, self.seconds, self.times_given_back = 0.0, 0.0, 0


class QuestionQueue(Generic[Q, A]):
    """Questions in order, each answered by whoever takes it. All methods may be called from any thread.

    `whom`: whom a run waits for, as messages call it. `stop`: whether it still waits where nobody can be reached.
    """

    def __init__(self, whom: str, stop: StopSignal | None = None) -> None:
        self._whom, self.stop = whom, stop or StopSignal()
        self._changed = threading.Condition()
        self._waiting: deque[Asked[Q, A]] = deque()
        self._unanswered: set[Asked[Q, A]] = set()
        self._error: TllmError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will be answered any more."""
        return self._error is not None

    @property
    def unanswered(self) -> int:
        """Questions that were asked and are not answered, taken or not."""
        return len(self._unanswered)

    def ask(self, question: Q) -> Asked[Q, A]:
        """Let it wait for the next who is free."""
        asked = Asked[Q, A](question)
        with self._changed:
            if self._error is not None:
                asked.answered.set_exception(self._error)
                return asked
            self._unanswered.add(asked)
            self._waiting.append(asked)
            self._changed.notify_all()
        return asked

    def take(self, wait: bool = True, unless: Callable[[], bool] = lambda: False) -> Asked[Q, A] | None:
        """The next question; None when there is none and nobody is to `wait`, or the queue is over, or `unless` holds,
        which is looked at again after `wake`."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self.is_over or unless())
            if not self._waiting or self.is_over or unless():
                return None
            asked = self._waiting.popleft()
            asked.taken = time.monotonic()
            return asked

    def wake(self) -> None:
        """Let all who wait look again whether they are to."""
        with self._changed:
            self._changed.notify_all()

    def give_back(self, questions: Sequence[Asked[Q, A]]) -> None:
        """Who took them was lost: they are the next again. One that was lost so often ends the waiting, as it may be
        what they fail of."""
        with self._changed:
            self._waiting.extendleft(reversed(questions))
            for asked in questions:
                asked.times_given_back += 1
            self._changed.notify_all()
            if any(asked.times_given_back == MOST_LOSSES for asked in questions):
                self.fail(
                    ClusterError(
                        f"{MOST_LOSSES} times a {self._whom} was lost that had the same question: it may be what they "
                        "fail of",
                        "see their logs, and whether their machines have the memory for it",
                    )
                )

    def answer(self, asked: Asked[Q, A], answer: A, nbytes: int) -> None:
        """What somebody found; nothing where the queue is over meanwhile."""
        with self._changed:
            if asked in self._unanswered:
                self._unanswered.remove(asked)
                asked.seconds = time.monotonic() - asked.taken
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
        self.fail(ClusterError(f"the run ended while it waited for a {self._whom}"))

    def pause(self, seconds: float) -> None:
        """Wait, or return early when the queue is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over, seconds)
