"""`TimedAnswerer`: a model that keeps how long its answers took and what they were about, to be compared with what was
predicted (`server.latency.TimedEngine` does so for requests)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tllm.planner.measured.outcome import WARM
from tllm.training.questions.question_server import Answerer, Session
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer
from tllm.training.teachers.teacher_messages import Question


class AnswerTotals:
    """How many answers there were, their seconds, and what they were about, of all that were answered together. Those
    that warm up count only while there are no others. Sessions add to it from their own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers = 0
        self._sums: dict[str, float] = {}

    def add(self, seconds: float, about: Mapping[str, int]) -> None:
        with self._lock:
            before = {} if self._answers == WARM else self._sums
            self._answers += 1
            self._sums = {
                name: before.get(name, 0) + number
                for name, number in {"timed": 1, "answer_seconds": seconds, **about}.items()
            }

    def totals(self) -> dict[str, float]:
        return dict(self._sums)


@dataclass(frozen=True)
class TimedAnswerer:
    """An `Answerer` like `model`, whose `answers` are added up."""

    model: Answerer[Any, Any, Any]
    answers: AnswerTotals = field(default_factory=AnswerTotals)

    @property
    def name(self) -> str:
        return self.model.name

    def open_session(self, introduction: Any) -> TimedSession:
        return TimedSession(self.model.open_session(introduction), self.answers)

    def stats(self) -> dict[str, float]:
        """As a node tells it: `timed` answers without those that warm up, the `answer_seconds` of all of them
        together, and what they were about."""
        return self.answers.totals()


@dataclass(frozen=True)
class TimedSession:
    """A `Session` like another, whose answers are added up."""

    session: Session[Any, Any]
    answers: AnswerTotals

    def answer(self, question: Any) -> Any:
        began = time.monotonic()
        answer = self.session.answer(question)
        about = subject(question, answer)
        if about and not answer.error:
            self.answers.add(time.monotonic() - began, about)
        return answer

    def failed(self, question: Any, reason: str) -> Any:
        return self.session.failed(question, reason)

    def close(self) -> None:
        self.session.close()


def subject(question: Any, answer: Any) -> Mapping[str, int]:
    """What the answer to a question is about: a row that was judged, or completions; nothing for other questions."""
    match question, answer:
        case Question(ids=ids), _:
            return {"row_tokens": len(ids) // 4}
        case PromptGroups(groups=groups), RolloutAnswer(completions=completions):
            return {
                "prompts": len(groups),
                "prompt_tokens": sum(len(group.ids) for group in groups),
                "completions": len(completions),
                "completion_tokens": sum(len(one.ids) for one in completions),
            }
    return {}
