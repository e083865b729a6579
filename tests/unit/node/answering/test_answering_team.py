"""What ends a team that computes one model: whatever leaves its ranks out of step, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from tllm.core.errors import ConfigError, FrameError, LinkClosed, LinkTimeout
from tllm.node.answering.answering_team import Ended, Handed, LeadingModel, Opened


class Model:
    """Answers with the question, or fails with it."""

    name = "model"

    def refusal(self, introduction: Any) -> str:
        return "it knows nothing of it" if introduction == "other" else ""

    def open_session(self, introduction: Any) -> Model:
        return self

    def check(self, question: Any) -> None:
        if question is None:
            raise FrameError("it is no question")

    def part_of(self, question: Any, rank: int) -> Any:
        return rank if question == 5 else None

    def compute(self, question: Any) -> Any:
        if isinstance(question, Exception):
            raise question
        return question

    def close(self) -> None: ...


class Team:
    """The first rank's end of a team that hears all."""

    def __init__(self) -> None:
        self.is_broken, self.told = threading.Event(), list[Any]()

    def tell(self, told: Any) -> None:
        self.told.append(told(1))


@pytest.mark.parametrize(
    ("fault", "raised"), [(RuntimeError("out of memory"), RuntimeError), (LinkTimeout("rank 1 is silent"), LinkClosed)]
)
def test_an_answer_that_fails_in_the_middle_ends_the_team(fault: Exception, raised: type[Exception]) -> None:
    """The others wait for what the first has not sent: they would take its next question's for that."""
    team = Team()
    leading = LeadingModel(Model(), team)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="knows nothing"):
        leading.open_session("other")
    assert not team.told, "nobody else was told of it"
    gone, session = leading.open_session("run"), leading.open_session("run")
    gone.close()
    assert session.answer(3) == 3 and session.answer(5) == 5
    run = msgspec.msgpack.encode("run")
    before = [Opened(0, run), Opened(1, run), Ended(0), None, Handed(1, msgspec.msgpack.encode(1))]
    assert team.told == before
    with pytest.raises(FrameError, match="no question"):
        session.answer(None)
    assert team.told == before and not team.is_broken.is_set(), "nobody else was told of it"
    with pytest.raises(raised):
        session.answer(fault)
    assert len(team.told) == 6 and team.is_broken.is_set()
    with pytest.raises(LinkClosed):
        session.answer(4)
    with pytest.raises(LinkClosed):
        leading.open_session("run")
    session.close()
    assert len(team.told) == 6, "the run asks whoever is left"
