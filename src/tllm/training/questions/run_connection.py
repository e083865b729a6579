"""`RunConnection`: two TLS connections between a run and a program elsewhere, one for questions and one for answers.

The run dials both, as it may be where nobody can dial it. Messages are msgpack in frames of bounded length; a
`Conversation` lists their types, such as those of teachers or of rollout servers.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec

from tllm.cluster.connection import NO_ADDRESS
from tllm.comm.links import frame
from tllm.comm.links.handshake import LINK_WELCOMES, peer_certificate, receive_message, send_message, start_tls
from tllm.comm.links.link import break_off
from tllm.comm.links.tcp_link import TcpLink, set_socket_options
from tllm.core.errors import AuthError, FrameError, LinkClosed, LinkError, decoded
from tllm.training.questions.answerer_places import AnswererPlace

RUN, ANSWERER = 0, 1
"""The two ends of a connection, as a link numbers them."""

DIAL_SECONDS = 5.0
SILENCE_SECONDS = 300.0
"""How long who was asked may say nothing before it is taken for lost."""

WORK_SECONDS = 60.0
"""Who is at work on an answer says so this often, by an empty message: the answer may take as long as it likes."""

GREETING_LIMIT = 1 << 20
QUESTION_LIMIT = 1 << 26
ANSWER_LIMIT = 1 << 30
"""Bytes of one message, at most."""

Direction = Literal["questions", "answers"]

Intro = TypeVar("Intro")
Q = TypeVar("Q")
A = TypeVar("A")


class RunHello(msgspec.Struct, frozen=True):
    """The first message of a run on each of its two links, which are of one `session`; `run` is its name, "" where
    whoever has the secret may ask."""

    session: str
    direction: Direction
    run: str = ""


RUN_HELLOS = msgspec.msgpack.Decoder(RunHello)


class Greeting(msgspec.Struct, frozen=True):
    """The answer to an introduction: which model it is, and why it cannot do this, "" where it can."""

    model: str
    refused: str = ""


@dataclass(frozen=True)
class Conversation(Generic[Intro, Q, A]):
    """What a run and an `answerer`, as messages call it, say to each other: one introduction, then questions."""

    answerer: str
    introductions: msgspec.msgpack.Decoder[Intro]
    questions: msgspec.msgpack.Decoder[Q]
    answers: msgspec.msgpack.Decoder[A]


_GREETINGS = msgspec.msgpack.Decoder(Greeting)


@dataclass(frozen=True, eq=False)
class RunConnection(Generic[Intro, Q, A]):
    """One end of the two links. `close` may be called from any thread, and wakes whoever waits."""

    conversation: Conversation[Intro, Q, A]
    questions: TcpLink
    answers: TcpLink

    @classmethod
    def dial(
        cls, conversation: Conversation[Intro, Q, A], place: AnswererPlace, context: ssl.SSLContext
    ) -> RunConnection[Intro, Q, A]:
        """Of the run. LinkClosed where nobody answers, AuthError where the two do not have the same secret."""
        session = secrets.token_hex(16)
        directions: tuple[Direction, ...] = ("questions", "answers")
        with contextlib.ExitStack() as stack:
            dialled = [
                stack.enter_context(
                    _dial(place, context, RunHello(session, direction, place.run), conversation.answerer)
                )
                for direction in directions
            ]
            stack.pop_all()  # both are there: the links close them
        return cls.over(conversation, *dialled)

    @classmethod
    def over(
        cls, conversation: Conversation[Intro, Q, A], questions: socket.socket, answers: socket.socket
    ) -> RunConnection[Intro, Q, A]:
        """Over two sockets whose handshakes are done."""
        return cls(
            conversation,
            TcpLink(questions, RUN, ANSWERER, deadline=SILENCE_SECONDS),
            TcpLink(answers, ANSWERER, RUN, deadline=SILENCE_SECONDS),
        )

    def introduce(self, introduction: Intro, on_work: Callable[[], object] = lambda: None) -> Greeting:
        """Of the run: say what is wanted. `on_work` is called while the answerer says that it is at work on it."""
        _sent(self.questions, introduction)
        return decoded(self._said(GREETING_LIMIT, on_work), _GREETINGS)

    def send_question(self, question: Q) -> int:
        """The bytes that it takes on the wire, but for what TLS adds."""
        return _sent(self.questions, question)

    def receive_answer(self) -> tuple[A, int]:
        content = self._said(ANSWER_LIMIT)
        return decoded(content, self.conversation.answers), len(content) + frame.HEADER_SIZE

    def receive_introduction(self) -> Intro:
        return decoded(self.questions.recv_bytes(QUESTION_LIMIT), self.conversation.introductions)

    def receive_question(self) -> Q:
        return decoded(self.questions.recv_bytes(QUESTION_LIMIT), self.conversation.questions)

    def send_answer(self, answer: A | Greeting) -> None:
        _sent(self.answers, answer)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Of the answerer: say now and then that an answer comes, until the block ends."""
        is_done = threading.Event()
        telling = threading.Thread(target=self._tell_of_work, args=(is_done,), name="tllm at work", daemon=True)
        telling.start()
        try:
            yield
        finally:
            is_done.set()
            telling.join()  # before anybody else sends

    def close(self) -> None:
        break_off((self.questions, self.answers))  # what was under way is asked again

    def _tell_of_work(self, is_done: threading.Event) -> None:
        with contextlib.suppress(LinkError):  # of which whoever sends the answer is told too
            while not is_done.wait(WORK_SECONDS):
                self.answers.send_bytes(b"")

    def _said(self, limit: int, on_work: Callable[[], object] = lambda: None) -> bytes:
        """The next message of the answerer that is not empty."""
        while not (content := self.answers.recv_bytes(limit)):
            on_work()
        return content


def _sent(link: TcpLink, message: Any) -> int:
    content = msgspec.msgpack.encode(message)
    link.send_bytes(content)
    return len(content) + frame.HEADER_SIZE


def _dial(place: AnswererPlace, context: ssl.SSLContext, hello: RunHello, answerer: str) -> socket.socket:
    address = place.address
    until = time.monotonic() + DIAL_SECONDS
    sock = None
    try:
        sock = socket.create_connection(address, timeout=DIAL_SECONDS)
        set_socket_options(sock)
        sock = start_tls(sock, context, address[0])
        names = [name for _, name in (peer_certificate(sock) or {}).get("subjectAltName", ())]
        if place.node and place.node not in names:
            raise FrameError(f"{' '.join(names) or 'nobody'} answers there, and not {place.node}")
        send_message(sock, hello, until)
        refused = receive_message(sock, LINK_WELCOMES, until).refused
        if not refused:
            return sock
        error: Exception = LinkClosed(refused)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # a process that ended in the middle, and no matter of trust
        error = LinkClosed("it hung up in the handshake")
    except ssl.SSLError as failure:
        error = AuthError(
            f"the {answerer} at {address[0]}:{address[1]} and this run do not trust each other: {failure.reason}",
            "both need the same file of the secret, and clocks that agree to an hour",
        )
    except (OSError, *NO_ADDRESS, FrameError) as failure:
        error = LinkClosed(getattr(failure, "strerror", None) or str(failure))
    if sock is not None:
        sock.close()
    raise error
