"""What a model tells of its answers: their seconds and what they were about, without faults and those that warm up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tllm.core.errors import FrameError
from tllm.node.answering import timed_answerer
from tllm.node.answering.timed_answerer import TimedAnswerer
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer, WeightHashes
from tllm.training.teachers.teacher_messages import Answer, Question, packed


class Clock:
    """A second longer for each answer than for the one before."""

    def __init__(self) -> None:
        self.now, self.count = 0.0, 0

    def monotonic(self) -> float:
        return self.now


class Model:
    """Gives these answers in turn, or raises them."""

    name = "model"

    def __init__(self, clock: Clock, *answers: Any) -> None:
        self.clock, self.answers, self.closed = clock, iter(answers), False

    def open_session(self, introduction: Any) -> Model:
        return self

    def answer(self, question: Any) -> Any:
        self.clock.count += 1
        self.clock.now += self.clock.count
        found = next(self.answers)
        if isinstance(found, Exception):
            raise found
        return found

    def failed(self, question: Any, reason: str) -> Any:
        return reason

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_answerer, "time", clock)
    return clock


def row(tokens: int) -> Question:
    return Question(1, packed(np.arange(tokens)), (tokens,), b"")


def test_rows_are_counted_after_the_first_two(clock: Clock) -> None:
    timed = TimedAnswerer(Model(clock, *[Answer(1)] * 4))
    session = timed.open_session(None)
    assert timed.stats() == {}
    for tokens in (5, 7, 11, 13):
        session.answer(row(tokens))
        if tokens == 7:
            assert timed.stats() == {"timed": 2, "answer_seconds": 3.0, "row_tokens": 12}, "all, while there are few"
    assert timed.stats() == {"timed": 2, "answer_seconds": 7.0, "row_tokens": 24}
    assert session.failed(row(1), "why") == "why"
    session.close()
    assert timed.model.closed  # type: ignore[attr-defined]


def test_of_what_is_sampled_groups_and_tokens_count_and_no_weights_or_faults(clock: Clock) -> None:
    done = RolloutAnswer(1, completions=tuple(Completion((1,) * count, (0.0,) * count, False) for count in (3, 4, 5)))
    table = [RolloutAnswer(lacking=(1,)), RolloutAnswer(1, error="no"), FrameError("no prompt"), done]
    session = (timed := TimedAnswerer(Model(clock, *table))).open_session(None)
    groups = (PromptGroup((1, 2), (3, 4)), PromptGroup((1, 2, 3), (5,)))
    prompts = PromptGroups(1, b"", groups, (), CompletionSampling(8))
    session.answer(WeightHashes(b"", b""))
    session.answer(prompts)
    with pytest.raises(FrameError):
        session.answer(prompts)
    session.answer(prompts)
    sizes = {"prompts": 2, "prompt_tokens": 5, "completions": 3, "completion_tokens": 12}
    assert timed.stats() == {"timed": 1, "answer_seconds": 4.0, **sizes}


def test_answers_are_counted_for_as_long_as_there_are_some(clock: Clock) -> None:
    """What is told after twice as many answers each time would else end with the most that are kept."""
    timed = TimedAnswerer(Model(clock, *[Answer(1)] * 3000))
    session = timed.open_session(None)
    for _ in range(3000):
        session.answer(row(2))
    assert timed.stats() == {"timed": 2998, "answer_seconds": sum(range(3, 3001)), "row_tokens": 2 * 2998}
