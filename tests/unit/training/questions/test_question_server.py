"""A program that answers runs: how long it may take, and what it may be told."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.support.training.post_training.teachers import in_a_thread
from tllm.cluster.certificates import Authority
from tllm.cluster.tls import data_client, data_server
from tllm.core.errors import LinkTimeout
from tllm.training.questions import run_connection
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.question_server import QuestionServer
from tllm.training.questions.run_connection import Conversation, RunConnection

LENGTHS: Conversation[str, str, int] = Conversation(
    "one that counts", msgspec.msgpack.Decoder(str), msgspec.msgpack.Decoder(str), msgspec.msgpack.Decoder(int)
)


class Counting:
    """Answers with the length of a question, and takes its `seconds` to greet and to answer, if it has no `fault`."""

    name, seconds = "counts", 0.0
    fault: Exception | None = None

    def __init__(self) -> None:
        self.answered = list[str]()

    def open_session(self, introduction: str) -> Counting:
        if self.fault is not None:
            raise self.fault
        time.sleep(self.seconds)
        return self

    def answer(self, question: str) -> int:
        self.answered.append(question)
        time.sleep(self.seconds)
        return len(question)

    def failed(self, question: str, reason: str) -> int:
        raise AssertionError(reason)

    def close(self) -> None: ...


@pytest.fixture
def counting() -> Counting:
    return Counting()


Dial = Callable[[], RunConnection[str, str, int]]


@pytest.fixture
def dial(counting: Counting) -> Iterator[Dial]:
    authority = Authority.create()
    server: Any = QuestionServer(counting, LENGTHS, ("127.0.0.1", 0), data_server(authority.identity("counts")))
    context = data_client(authority.identity("run"))
    with in_a_thread(server), contextlib.ExitStack() as dialled:

        def dial() -> RunConnection[str, str, int]:
            connection: RunConnection[str, str, int] = RunConnection.dial(
                LENGTHS, AnswererPlace("here", server.address), context
            )
            dialled.callback(connection.close)
            return connection

        yield dial


@pytest.fixture
def connection(dial: Dial) -> RunConnection[str, str, int]:
    return dial()


def test_who_is_at_work_for_longer_than_a_silence_is_not_taken_for_lost(
    counting: Counting, connection: RunConnection[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that took more than five minutes for its completions was asked ten times, and the run then ended."""
    connection.answers.set_deadline(1.0)
    monkeypatch.setattr(run_connection, "WORK_SECONDS", 0.05)
    counting.seconds, told = 2.0, list[None]()
    assert not connection.introduce("a run", lambda: told.append(None)).refused and told
    connection.send_question("1234")
    assert connection.receive_answer()[0] == 4
    monkeypatch.setattr(run_connection, "WORK_SECONDS", 60.0)
    connection.send_question("12345")
    with pytest.raises(LinkTimeout):
        connection.receive_answer()


def test_a_run_is_introduced_by_as_much_as_a_question_may_hold(connection: RunConnection[str, str, int]) -> None:
    """A job of many files was told as a lost connection, again and again."""
    assert not connection.introduce("a" * (2 << 20)).refused
    connection.send_question("1")
    assert connection.receive_answer()[0] == 1


def test_a_run_is_told_of_what_the_system_refuses_the_server(
    counting: Counting, connection: RunConnection[str, str, int]
) -> None:
    """It hung up without a word, and the run dialled again for 500 s."""
    counting.fault = PermissionError(errno.EACCES, "Permission denied", "model.safetensors")
    assert "Permission denied: 'model.safetensors'" in connection.introduce("a run").refused


def test_a_fault_that_says_nothing_is_told_by_its_kind(
    counting: Counting, connection: RunConnection[str, str, int]
) -> None:
    """As Python's own MemoryError, where numpy's and torch's have words."""
    counting.fault = MemoryError()
    assert connection.introduce("a run").refused == "it failed: MemoryError"


def test_nothing_is_computed_for_a_run_that_has_gone(
    counting: Counting, connection: RunConnection[str, str, int], dial: Dial
) -> None:
    """Else the model is built again for each connection that a run has lost, while the run itself waits its turn."""
    gone = dial()
    for one in (connection, gone):
        one.introduce("a run")
    counting.seconds = 1.0
    connection.send_question("at work")
    while not counting.answered:
        time.sleep(0.01)
    gone.send_question("in vain")
    time.sleep(0.2)
    gone.close()
    connection.receive_answer()
    connection.send_question("at last")
    connection.receive_answer()
    assert counting.answered == ["at work", "at last"]
