"""Teachers of tests: served in a thread of this process, which can be ended as a dead process ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tllm.cluster.tls import data_server
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.training.teachers.teacher_secret import teacher_identity
from tllm.training.teachers.teacher_server import TeacherServer


@contextmanager
def serving(folder: Path, secret: Path, dtype: str = "float32", port: int = 0) -> Iterator[TeacherServer]:
    """A teacher at a port of loopback while the block lasts, unless it is closed before."""
    context = data_server(teacher_identity(secret, "teacher", make=True))
    server = TeacherServer(TeacherModel.open(str(folder), dtype), "127.0.0.1", port, context)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)
        assert not thread.is_alive()


def address_of(server: TeacherServer) -> str:
    return "{}:{}".format(*server.address)
