"""Teachers of tests: served in a thread of this process, which can be ended as a dead process ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tllm.cluster.tls import data_server
from tllm.training.questions.question_server import QuestionServer
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.teachers.teacher_messages import TEACHING, Answer, Lesson, Question
from tllm.training.teachers.teacher_model import TeacherModel

TeacherServer = QuestionServer[Lesson, Question, Answer]


@contextmanager
def serving(folder: Path, secret: Path, dtype: str = "float32", port: int = 0) -> Iterator[TeacherServer]:
    """A teacher at a port of loopback while the block lasts, unless it is closed before."""
    context = data_server(shared_identity(secret, "teacher", "tllm teach", make=True))
    server = QuestionServer(TeacherModel.open(str(folder), dtype), TEACHING, ("127.0.0.1", port), context)
    with in_a_thread(server):
        yield server


@contextmanager
def in_a_thread(server: QuestionServer[Any, Any, Any]) -> Iterator[None]:
    """The server serves while the block lasts."""
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.close()
        thread.join(20)
        assert not thread.is_alive()


def address_of(server: QuestionServer[Any, Any, Any]) -> str:
    return "{}:{}".format(*server.address)
