"""A run that waits for programs elsewhere: its own pauses do not count, and what it dialled in vain is let go."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from itertools import chain, count, repeat
from typing import Any

import pytest

from tllm.core.errors import ClusterError, ConfigError, LinkClosed
from tllm.core.timing import AwakeClock
from tllm.training.questions import remote_answerer
from tllm.training.questions.answerer_places import AnswererPlace, ReadingAnswerer
from tllm.training.questions.answerer_pool import AnswererPool
from tllm.training.questions.remote_answerer import RemoteAnswerer, wait_for
from tllm.training.questions.run_connection import Greeting, RunConnection
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.teachers.teacher_messages import TEACHING, Answer, Lesson, Question
from tllm.training.teachers.teacher_threads import TeacherInquirer, TeacherQueue

LESSON = Lesson(top_k=2, temperature=1.0, vocab_size=50, vocabulary="")


class Away:
    """One that is dialled again, whose connection was lost while the run stood still."""

    name, trouble, bytes_read = "far:1", "the connection ended", 0

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


def test_a_run_waits_while_a_node_reads_its_model_and_not_for_one_that_reads_no_further(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says how far that is, and names it in the end. One that begins anew is waited for too."""
    seconds, read = count(0.0, 100.0), iter([3, 4, 5, 1, 2, 3, 4, 5, 6, 7])
    monkeypatch.setattr(remote_answerer, "AwakeClock", lambda every: seconds.__next__)
    monkeypatch.setattr(remote_answerer, "LOOK_SECONDS", 0.001)
    queue = TeacherQueue("teacher")
    pool = AnswererPool(TeacherInquirer(LESSON), queue, ssl.create_default_context())

    def reads_on() -> None:
        pool.hear([ReadingAnswerer("box2", next(read, 7) << 30, 20 << 30)])

    whole = (
        r"box2 \(has read 7\.00 GiB of 20\.00 GiB of its model\); none could be reached, or read any further, for 600 s"
    )
    with pytest.raises(ConfigError, match=whole):
        pool.answer_of(queue.ask(Question(1, b"", (1,), b"")), reads_on)
    assert next(seconds) == 1700, "it read more until 1000"
    assert "waiting for the teachers box2 (has read 3.00 GiB of 20.00 GiB of its model)" in caplog.text


class Silent:
    """A connection whose other end says nothing, but for what a closed one raises."""

    def __init__(self) -> None:
        self.closed = 0

    def introduce(self, introduction: Any) -> Any:
        raise AssertionError("nobody is to wait for an answer any more")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    "end", [lambda one, queue: one.retire(), lambda one, queue: queue.close()], ids=["retired", "over"]
)
def test_a_connection_that_comes_after_the_end_is_closed(
    end: Callable[[Any, TeacherQueue], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of a run waited for a greeting, which takes as long as a model is built."""
    queue, silent = TeacherQueue("teacher"), Silent()
    place = AnswererPlace("far:1", ("far", 1))
    one = RemoteAnswerer(place, ssl.create_default_context(), TeacherInquirer(LESSON), queue)

    def dial(*args: Any) -> Any:
        end(one, queue)
        return silent

    monkeypatch.setattr(RunConnection, "dial", dial)
    one._run()
    assert silent.closed == 1


class Greets:
    """A connection to somebody who greets every run."""

    def introduce(self, introduction: Any, on_work: Any) -> Greeting:
        return Greeting("far")

    def close(self) -> None: ...


def test_a_run_that_has_no_memory_for_what_it_asks_ends_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ended without a word, and the run waited for one that was "computing" for ever."""

    def send(*args: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(RunConnection, "dial", lambda *args: Greets())
    monkeypatch.setattr(TeacherInquirer, "send", send)
    queue = TeacherQueue("teacher")
    asked = queue.ask(Question(1, b"", (1,), b""))
    one = RemoteAnswerer(
        AnswererPlace("far:1", ("far", 1)), ssl.create_default_context(), TeacherInquirer(LESSON), queue
    )
    one._run()
    with pytest.raises(ClusterError, match="there is no memory for what goes to the teacher at far:1"):
        asked.answered.result(0)


def test_who_has_a_name_that_none_can_have_is_dialled_as_one_that_nobody_knows() -> None:
    """Its thread ended with the error of Python's library, and nobody was told why."""
    with pytest.raises(LinkClosed, match="label"):
        RunConnection.dial(TEACHING, AnswererPlace("a..b:1", ("a..b", 1)), ssl.create_default_context())
