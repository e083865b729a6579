"""`StatelessSession`: a model answers the questions of one run, and keeps nothing between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True)
class StatelessSession(Generic[Q, A]):
    """A `Session` of a teacher or of a reward model. Where ranks compute the model together, each gets every question.

    `checks` raises FrameError for a question that is none. `answers` checks a question too, and answers it. `refuses`
    makes the answer that tells why there is none.
    """

    checks: Callable[[Q], None]
    answers: Callable[[Q], A]
    refuses: Callable[[Q, str], A]

    def check(self, question: Q) -> None:
        self.checks(question)

    def part_of(self, question: Q, rank: int) -> Q:
        """The whole question, for every rank."""
        return question

    def compute(self, question: Q) -> A:
        return self.answers(question)

    answer = compute

    def failed(self, question: Q, reason: str) -> A:
        return self.refuses(question, reason)

    def close(self) -> None:
        """Nothing is held for one run."""
