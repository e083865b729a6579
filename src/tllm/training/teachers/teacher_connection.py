"""`TeacherConnection`: two links over TLS between a run and a teacher, one for questions and one for answers.

Both are dialled by the run, which may be where nobody can dial it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from tllm.comm.links import frame
from tllm.comm.links.handshake import LinkHello, LinkWelcome, receive_message, send_message
from tllm.comm.links.tcp_link import TcpLink, set_socket_options
from tllm.core.errors import AuthError, FrameError, LinkClosed, LinkError
from tllm.training.teachers.teacher_messages import (
    ANSWER_LIMIT,
    GREETING_LIMIT,
    QUESTION_LIMIT,
    Answer,
    Greeting,
    Lesson,
    Question,
    decoded,
)

RUN, TEACHER = 0, 1
"""The two ends of a connection, as a link numbers them."""

DIAL_SECONDS = 5.0
SILENCE_SECONDS = 300.0
"""How long an answer may take before the teacher is taken for lost: several long rows on a slow machine."""

Direction = Literal["questions", "answers"]


@dataclass(frozen=True)
class TeacherConnection:
    """One end of the two links. `close` may be called from any thread, and wakes whoever waits."""

    questions: TcpLink
    answers: TcpLink

    @classmethod
    def dial(cls, address: tuple[str, int], context: ssl.SSLContext) -> TeacherConnection:
        """Of the run. LinkClosed where nobody answers, AuthError where the two do not have the same secret."""
        session = secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            dialled = [
                stack.enter_context(_dial(address, context, LinkHello(session, 0, RUN, TEACHER, direction)))
                for direction in ("questions", "answers")
            ]
            stack.pop_all()  # both are there: the links close them
        return cls.over(*dialled)

    @classmethod
    def over(cls, questions: socket.socket, answers: socket.socket) -> TeacherConnection:
        """Over two sockets whose handshakes are done."""
        return cls(
            TcpLink(questions, RUN, TEACHER, deadline=SILENCE_SECONDS),
            TcpLink(answers, TEACHER, RUN, deadline=SILENCE_SECONDS),
        )

    def introduce(self, lesson: Lesson) -> Greeting:
        """Of the run: say what is wanted."""
        self.questions.send_bytes(msgspec.msgpack.encode(lesson))
        return decoded(self.answers.recv_bytes(GREETING_LIMIT), Greeting)

    def send_question(self, question: Question) -> int:
        """The bytes that it takes on the wire, but for what TLS adds."""
        return _sent(self.questions, question)

    def receive_answer(self) -> tuple[Answer, int]:
        content = self.answers.recv_bytes(ANSWER_LIMIT)
        return decoded(content, Answer), len(content) + frame.HEADER_SIZE

    def receive_lesson(self) -> Lesson:
        return decoded(self.questions.recv_bytes(GREETING_LIMIT), Lesson)

    def receive_question(self) -> Question:
        return decoded(self.questions.recv_bytes(QUESTION_LIMIT), Question)

    def send_answer(self, answer: Answer | Greeting) -> None:
        _sent(self.answers, answer)

    def close(self) -> None:
        for link in (self.questions, self.answers):
            link.interrupt()
            with contextlib.suppress(LinkError):  # what was under way is asked again
                link.close()


def _sent(link: TcpLink, message: Question | Answer | Greeting) -> int:
    content = msgspec.msgpack.encode(message)
    link.send_bytes(content)
    return len(content) + frame.HEADER_SIZE


def _dial(address: tuple[str, int], context: ssl.SSLContext, hello: LinkHello) -> socket.socket:
    until = time.monotonic() + DIAL_SECONDS
    sock = None
    try:
        sock = socket.create_connection(address, timeout=DIAL_SECONDS)
        set_socket_options(sock)
        sock = context.wrap_socket(sock, server_hostname=address[0])
        send_message(sock, hello, until)
        refused = receive_message(sock, LinkWelcome, until).refused
        if not refused:
            return sock
        error: Exception = LinkClosed(refused)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # a process that ended in the middle, and no matter of trust
        error = LinkClosed("it hung up in the handshake")
    except ssl.SSLError as failure:
        error = AuthError(
            f"the teacher at {address[0]}:{address[1]} and this run do not trust each other: {failure.reason}",
            "both need the same file of the secret, and clocks that agree to an hour",
        )
    except (OSError, FrameError) as failure:
        error = LinkClosed(getattr(failure, "strerror", None) or str(failure))
    if sock is not None:
        sock.close()
    raise error
