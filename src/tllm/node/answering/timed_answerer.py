"""`TimedAnswerer`: a model that keeps how long its answers took and what they were about, to be compared with what was
predicted (`server.latency.TimedEngine` does so for requests)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tllm.planner.measured.outcome import WARM
from tllm.training.questions.question_server import Answerer, Session
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer
from tllm.training.teachers.teacher_messages import Question

MOST_KEPT = 1000
"""Of the newest answers."""


class TimedAnswer(NamedTuple):
    """Seconds of one answer, and what it is about, by name."""

    seconds: float
    about: Mapping[str, int]


@dataclass(frozen=True)
class TimedAnswerer:
    """An `Answerer` like `model`, whose `answers` are kept."""

    model: Answerer[Any, Any, Any]
    answers: deque[TimedAnswer] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))

    @property
    def name(self) -> str:
        return self.model.name

    def open_session(self, introduction: Any) -> TimedSession:
        return TimedSession(self.model.open_session(introduction), self.answers)

    def stats(self) -> dict[str, float]:
        """As a node tells it: `timed` answers without those that warm up, the `answer_seconds` of all of them
        together, and what they were about."""
        kept = list(self.answers)
        return totals(kept[WARM:] or kept)


@dataclass(frozen=True)
class TimedSession:
    """A `Session` like another, whose answers are kept."""

    session: Session[Any, Any]
    answers: deque[TimedAnswer]

    def answer(self, question: Any) -> Any:
        began = time.monotonic()
        answer = self.session.answer(question)
        about = subject(question, answer)
        if about and not answer.error:
            self.answers.append(TimedAnswer(time.monotonic() - began, about))
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


def totals(answers: Iterable[TimedAnswer]) -> dict[str, float]:
    """Of several answers."""
    found = Counter[str]()
    seconds = 0.0
    for one in answers:
        found.update({"timed": 1, **one.about})
        seconds += one.seconds
    return {**found, "answer_seconds": seconds} if found else {}
