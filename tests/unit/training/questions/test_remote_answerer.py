"""A run that waits for programs elsewhere: its own pauses do not count."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from tllm.core.timing import AwakeClock
from tllm.training.questions import remote_answerer
from tllm.training.questions.remote_answerer import wait_for
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.teachers.teacher_messages import Answer, Question
from tllm.training.teachers.teacher_threads import TeacherQueue

class Away:
    """One that is dialled again, whose connection was lost while the run stood still."""

    name, trouble = "far:1", "the connection ended"

    def start(self) -> None: ...

    def close(self) -> None: ...


def test_who_waits_does_not_count_the_time_in_which_it_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TeacherQueue("teacher")
    asked = queue.ask(Question(1, b"", (1,), b""))
    looks = chain([0.0, 0.0], repeat(3600.0, 3))

    def clock() -> float:
        if (now := next(looks, None)) is None:
            queue.answer(asked, Answer(1), 7)
        return 3600.0 if now is None else now

    monkeypatch.setattr(remote_answerer, "AwakeClock", lambda every: AwakeClock(every, clock))
    monkeypatch.setattr(remote_answerer, "LOOK_SECONDS", 0.01)
    told = wait_for(asked, [Away()], "step 1", lambda: "far:1", lambda whom: None, StopSignal())
    assert told == (Answer(1), 7)
