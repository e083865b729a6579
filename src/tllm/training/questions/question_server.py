"""`QuestionServer`: answers the questions of training runs on other machines, any number of runs at a time."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, Protocol, TypeVar

from tllm.cluster.tls import peer_name
from tllm.comm.links.handshake import LinkWelcome, receive_message, send_message, start_tls
from tllm.comm.links.send_buffer import shut
from tllm.comm.links.tcp_link import set_socket_options
from tllm.core.errors import ClusterError, FrameError, LinkClosed, LinkError, TllmError, counted
from tllm.training.questions.answerer_places import AskingRun
from tllm.training.questions.run_connection import (
    RUN_HELLOS,
    Conversation,
    Direction,
    Greeting,
    RunConnection,
    RunHello,
)

HELLO_SECONDS = 5.0
"""For the handshake of one connection, and for the second of a run's two to follow the first."""
HALF_OPEN = 32
"""Connections in their handshake at a time, and first ones that wait for their second."""

FAULTS = (TllmError, OSError, RuntimeError, MemoryError)
"""With these the run is to end, and not to ask again: ours, what the system refuses (a file that may not be read, say),
and memory that is not there, as torch and as numpy say it."""

log = logging.getLogger("tllm.answers")

Introduced = TypeVar("Introduced", contravariant=True)
Questioned = TypeVar("Questioned", contravariant=True)
Answered = TypeVar("Answered", covariant=True)
Intro = TypeVar("Intro")
Q = TypeVar("Q")
A = TypeVar("A")


class Session(Protocol[Questioned, Answered]):
    """What answers one run. `answer` is called by one thread at a time. A LinkClosed of it ends the session: processes
    that it computed with are lost, and the run asks another."""

    def answer(self, question: Questioned) -> Answered:
        """An error, FrameError for a question that is none, is told to the run by `failed`."""

    def failed(self, question: Questioned, reason: str) -> Answered:
        """An answer that tells why there is none."""

    def close(self) -> None: ...


class Answerer(Protocol[Introduced, Questioned, Answered]):
    """A model that answers runs, each in a session of its own. `name` is how it was asked for."""

    @property
    def name(self) -> str: ...

    def open_session(self, introduction: Introduced) -> Session[Questioned, Answered]:
        """ConfigError, whose message is told to the run, where this cannot be done."""


class FirstLink(NamedTuple):
    """Of a run's two links the one that came first, and when."""

    since: float
    direction: Direction
    sock: socket.socket


class QuestionServer(Generic[Intro, Q, A]):
    """Listens from when it is made; `serve` returns when it is closed. Runs take turns, a question at a time.

    `asker` says who alone may ask now, None for nobody yet; without it, whoever the `context` trusts.
    """

    def __init__(
        self,
        answerer: Answerer[Intro, Q, A],
        conversation: Conversation[Intro, Q, A],
        address: tuple[str, int],
        context: ssl.SSLContext,
        asker: Callable[[], AskingRun | None] | None = None,
    ) -> None:
        self._answerer, self._conversation, self._context, self._asker = answerer, conversation, context, asker
        host, port = address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=HALF_OPEN)
        except OSError as error:
            raise ClusterError(
                f"cannot listen on {host}:{port} for runs: {error.strerror}", "give another port, or 0 for any free one"
            ) from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._computing = threading.Lock()
        self._lock = threading.Lock()
        self._firsts: dict[tuple[str, AskingRun], FirstLink] = {}
        self._runs: dict[RunConnection[Intro, Q, A], threading.Thread] = {}
        self._closed = threading.Event()
        self.answered = 0
        """Questions so far, of all runs."""

    @property
    def is_computing(self) -> bool:
        """Whether a question is at hand."""
        return self._computing.locked()

    def serve(self) -> None:
        """Take connections until `close`."""
        room = threading.Semaphore(HALF_OPEN)
        with ThreadPoolExecutor(HALF_OPEN, "tllm hello") as pool:
            while True:
                room.acquire()  # whoever finds none waits in the kernel's queue, and takes no descriptor here
                try:
                    sock, peer = self._socket.accept()
                except OSError:
                    room.release()
                    if self._closed.is_set():
                        return
                    log.exception("accepting a run failed")
                    time.sleep(0.05)  # out of file descriptors: let some close
                    continue
                shaking = pool.submit(self._shake_hands, sock, f"{peer[0]}:{peer[1]}")
                shaking.add_done_callback(lambda _: room.release())

    def close(self) -> None:
        """End every connection, once the question at hand is answered; the others are asked of somebody else."""
        self._closed.set()
        shut(self._socket)
        self._socket.close()
        with self._lock:
            runs = dict(self._runs)
            firsts = list(self._firsts.values())
            self._firsts.clear()  # a second that comes now finds no closed one to pair with
        for first in firsts:
            first.sock.close()
        for connection in runs:
            connection.close()
        for thread in runs.values():
            thread.join()  # torch aborts a process that ends while a thread is in it

    def _shake_hands(self, raw: socket.socket, peer: str) -> None:
        sock, until = raw, time.monotonic() + HELLO_SECONDS
        try:
            set_socket_options(sock)
            sock.settimeout(HELLO_SECONDS)
            sock = start_tls(sock, self._context)
            hello = receive_message(sock, RUN_HELLOS, until)
            speaker = AskingRun(peer_name(sock) or "", hello.run)
            refusal = self._refusal(speaker)
            send_message(sock, LinkWelcome(refusal), until)
            if refusal:
                raise FrameError(refusal)
        except (OSError, FrameError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            log.warning("refused a connection from %s: %s", peer, error)
            sock.close()
            return
        self._pair(hello, speaker, sock, peer)

    def _refusal(self, speaker: AskingRun) -> str:
        """Why this one may not ask, in words; "" where it may."""
        if self._asker is None:
            return ""
        whom = f"a {self._conversation.answerer} of this cluster"
        if (asker := self._asker()) is None:
            return f"{speaker.node} asks {whom}, which was not told yet whom it answers"
        if speaker.node != asker.node:
            return f"{speaker.node} asks {whom}, which answers {asker.node}"
        if speaker.run != asker.run:
            return f"{speaker.node} asks {whom} for the run {speaker.run[:64]!r}, and it answers {asker.run!r}"
        return ""

    def _pair(self, hello: RunHello, speaker: AskingRun, sock: socket.socket, peer: str) -> None:
        """Keep the first of a run's two connections until the second is here, and then answer it."""
        now, key = time.monotonic(), (hello.session, speaker)
        with self._lock:
            for old in [key for key, first in self._firsts.items() if now - first.since > HELLO_SECONDS]:
                self._firsts.pop(old).sock.close()
            first = self._firsts.pop(key, None)
            if first is None and len(self._firsts) < HALF_OPEN and not self._closed.is_set():
                self._firsts[key] = FirstLink(now, hello.direction, sock)
                return
        if first is None or first.direction == hello.direction:
            for one in (sock, *(() if first is None else (first.sock,))):
                one.close()
            return
        both = {first.direction: first.sock, hello.direction: sock}
        connection = RunConnection.over(self._conversation, both["questions"], both["answers"])
        thread = threading.Thread(
            target=self._serve_run, args=(connection, speaker, peer), name="tllm run", daemon=True
        )
        with self._lock:
            if not self._closed.is_set():
                self._runs[connection] = thread
                thread.start()
                return
        connection.close()

    def _serve_run(self, connection: RunConnection[Intro, Q, A], speaker: AskingRun, peer: str) -> None:
        session = None
        try:
            session = self._opened(connection, peer)
            if session is None:
                return
            try:
                self._answer(connection, session, speaker, peer)
            finally:
                session.close()
        except FrameError as error:
            log.warning("the run at %s says what no run says: %s", peer, error.message)
        except LinkError:
            if session is not None and not self._closed.is_set():  # others only look whether they are trusted
                log.info("the run at %s is gone", peer)
        finally:
            connection.close()
            with self._lock:
                self._runs.pop(connection, None)

    def _opened(self, connection: RunConnection[Intro, Q, A], peer: str) -> Session[Q, A] | None:
        """Greet the run; None for one that cannot be served, which is told why."""
        introduction = connection.receive_introduction()
        try:
            with self._turn(connection):
                session = self._answerer.open_session(introduction)
        except FrameError:
            raise
        except LinkClosed as error:  # of the run, or of others who compute the model: it asks whoever is left
            log.warning("cannot serve the run at %s: %s", peer, error.message)
            return None
        except FAULTS as error:
            log.warning("cannot serve the run at %s: %s", peer, reason_of(error))
            connection.send_answer(Greeting(self._answerer.name, reason_of(error)))
            return None
        try:
            connection.send_answer(Greeting(self._answerer.name))
        except LinkError:
            session.close()
            raise
        log.info("serving the run at %s", peer)
        return session

    @contextlib.contextmanager
    def _turn(self, connection: RunConnection[Intro, Q, A]) -> Iterator[None]:
        """A run's, for which it may have to wait. LinkClosed where it has gone meanwhile."""
        with connection.at_work(), self._computing:
            if connection.questions.is_over:
                raise LinkClosed("it has gone")
            yield

    def _answer(
        self, connection: RunConnection[Intro, Q, A], session: Session[Q, A], speaker: AskingRun, peer: str
    ) -> None:
        connection.questions.set_deadline(float("inf"))  # its steps may take long
        answers = 0
        try:
            while True:
                question = connection.receive_question()
                if refusal := self._refusal(speaker):  # another asks since
                    log.warning("answers %s no more: %s", peer, refusal)
                    return
                try:
                    with self._turn(connection):
                        answer = session.answer(question)
                        self.answered += 1
                except LinkClosed as error:  # of the run, or of others who compute the model
                    log.warning("answers %s no more: %s", peer, error.message)
                    return
                except FAULTS as error:
                    answer = session.failed(question, reason_of(error))
                connection.send_answer(answer)
                answers += 1
        finally:
            were = counted(answers, f"question of the run at {peer} was", f"questions of the run at {peer} were")
            log.info("%s answered", were)


def reason_of(error: TllmError | OSError | RuntimeError | MemoryError) -> str:
    """What one of FAULTS says, in one line; Python's own MemoryError says nothing."""
    if isinstance(error, TllmError):
        return error.message
    return f"it failed: {str(error) or type(error).__name__}".splitlines()[0]
