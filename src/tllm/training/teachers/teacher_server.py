"""`TeacherServer`: serves a teacher's log-probabilities to runs on other machines, any number of them at a time."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tllm.comm.links.handshake import LinkHello, LinkWelcome, receive_message, send_message
from tllm.comm.links.send_buffer import shut
from tllm.comm.links.tcp_link import set_socket_options
from tllm.core.errors import ClusterError, FrameError, LinkError
from tllm.training.teachers.teacher_connection import RUN, TEACHER, TeacherConnection
from tllm.training.teachers.teacher_messages import Answer, Greeting
from tllm.training.teachers.teacher_model import TeacherModel

HELLO_SECONDS = 5.0
"""For the handshake of one connection, and for the second of a run's two to follow the first."""
HALF_OPEN = 32
"""Connections in their handshake at a time, and first ones that wait for their second."""

log = logging.getLogger("tllm.teach")


class TeacherServer:
    """Listens from when it is made; `serve` returns when it is closed. Runs take turns, a row at a time."""

    def __init__(self, teacher: TeacherModel, host: str, port: int, context: ssl.SSLContext) -> None:
        self._teacher, self._context = teacher, context
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
        self._firsts: dict[str, tuple[float, str, socket.socket]] = {}
        self._runs: dict[TeacherConnection, threading.Thread] = {}
        self._closed = threading.Event()

    def serve(self) -> None:
        """Take connections until `close`."""
        with ThreadPoolExecutor(HALF_OPEN, "tllm-teach hello") as pool:
            while True:
                try:
                    sock, peer = self._socket.accept()
                except OSError:
                    if self._closed.is_set():
                        return
                    log.exception("accepting a run failed")
                    time.sleep(0.05)  # out of file descriptors: let some close
                    continue
                pool.submit(self._shake_hands, sock, f"{peer[0]}:{peer[1]}")

    def close(self) -> None:
        """End every connection, once the row that is computed is done; the others are asked of another teacher."""
        self._closed.set()
        shut(self._socket)
        self._socket.close()
        with self._lock:
            runs = dict(self._runs)
            firsts = [sock for _, _, sock in self._firsts.values()]
        for sock in firsts:
            sock.close()
        for connection in runs:
            connection.close()
        for thread in runs.values():
            thread.join()  # torch aborts a process that ends while a thread is in it

    def _shake_hands(self, raw: socket.socket, peer: str) -> None:
        sock, until = raw, time.monotonic() + HELLO_SECONDS
        try:
            set_socket_options(sock)
            sock.settimeout(HELLO_SECONDS)
            sock = self._context.wrap_socket(sock, server_side=True)
            hello = receive_message(sock, LinkHello, until)
            if hello.name not in ("questions", "answers") or (hello.source, hello.target) != (RUN, TEACHER):
                raise FrameError(f"a {hello.name[:20]!r} link, which no teacher has")
            send_message(sock, LinkWelcome(), until)
        except (OSError, FrameError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            log.warning("refused a connection from %s: %s", peer, error)
            sock.close()
            return
        self._pair(hello, sock, peer)

    def _pair(self, hello: LinkHello, sock: socket.socket, peer: str) -> None:
        """Keep the first of a run's two connections until the second is here, and then answer it."""
        now = time.monotonic()
        with self._lock:
            for session in [s for s, (when, _, _) in self._firsts.items() if now - when > HELLO_SECONDS]:
                self._firsts.pop(session)[2].close()
            first = self._firsts.pop(hello.cluster, None)
            if first is None and len(self._firsts) < HALF_OPEN and not self._closed.is_set():
                self._firsts[hello.cluster] = now, hello.name, sock
                return
        if first is None or first[1] == hello.name:
            sock.close()
            return
        both = {first[1]: first[2], hello.name: sock}
        connection = TeacherConnection.over(both["questions"], both["answers"])
        thread = threading.Thread(target=self._answer, args=(connection, peer), name="tllm-teach", daemon=True)
        with self._lock:
            if not self._closed.is_set():
                self._runs[connection] = thread
                thread.start()
                return
        connection.close()

    def _answer(self, connection: TeacherConnection, peer: str) -> None:
        rows = 0
        try:
            lesson = connection.receive_lesson()
            refused = self._teacher.refusal(lesson)
            connection.send_answer(Greeting(self._teacher.name, refused))
            if refused:
                log.warning("cannot teach the run at %s: %s", peer, refused)
                return
            log.info("teaching the run at %s: top_k = %d", peer, lesson.top_k)
            connection.questions.set_deadline(float("inf"))  # its steps may take long
            while True:
                question = connection.receive_question()
                try:
                    with self._computing:
                        answer = self._teacher.answer(question, lesson)
                except FrameError as error:
                    answer = Answer(question.number, error=error.message)
                connection.send_answer(answer)
                rows += 1
        except FrameError as error:
            log.warning("the run at %s says what no run says: %s", peer, error.message)
        except LinkError:
            if not self._closed.is_set():
                log.info("the run at %s is gone, after %d rows", peer, rows)
        finally:
            connection.close()
            with self._lock:
                self._runs.pop(connection, None)
