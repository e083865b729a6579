"""`WorkerForks`: processes of workers on this machine, forked by a server that has imported torch for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

import tllm
from tllm.core.program import computing_environment

log = logging.getLogger("tllm.node")

TAIL_LINES = 20
LINE_BYTES = 64 * 1024
"""A longer line is taken in pieces."""


class WorkerProcess:
    """A worker's process, which may still have to be forked: it has a `pid` when it was.

    `exit_code` is the negative number of the signal that ended it, and None, which says nothing of its end, if the
    server ended before it; then `last_words` are the server's.
    """

    def __init__(self, stdin: asyncio.WriteTransport, stderr: asyncio.StreamReader) -> None:
        self.stdin, self.stderr = stdin, stderr
        self.pid: int | None = None
        self.exit_code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.last_words = ""

    def kill(self) -> None:
        """End it and all that it started, now. One that is yet to be forked ends with its stdin."""
        self.stdin.close()
        if not self.exit_code.done() or self.exit_code.result() is None:
            self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and all that it started, if it was forked."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class WorkerForks:
    """Starts processes of workers that compute with so many threads each, by one fork server."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._server: _Server | None = None

    async def start(self) -> WorkerProcess:
        """A process that waits for its settings. It is there as soon as the server is, which this does not wait for."""
        if self._server is None or self._server.has_ended:
            self._server = await _Server.start(self._threads)
        return await self._server.fork()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all workers that are forked."""
        for worker in () if self._server is None else self._server.workers:
            worker.signal(number)

    def kill(self) -> None:
        """Fork nothing more. What is forked goes on."""
        if self._server is not None:
            self._server.kill()

    async def close(self) -> None:
        """End the server, once its workers have ended."""
        if self._server is not None:
            await self._server.close()


class _Server:
    """One server process (`tllm.node.fork_server`), the workers that it is to fork, and those that it has."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        self._asked: deque[WorkerProcess] = deque()
        self._forked: dict[int, WorkerProcess] = {}
        self._received = b""
        self.has_ended = False
        self._watch = asyncio.create_task(self._follow(), name="fork server")

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """Those that it has forked and that have not ended."""
        return tuple(self._forked.values())

    @classmethod
    async def start(cls, threads: int) -> _Server:
        control, theirs = socket.socketpair()
        control.setblocking(False)
        command, environment = worker_command(threads, "tllm.node.fork_server", str(theirs.fileno()))
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for us; we then end the workers in order
            )
        return cls(process, control)

    async def fork(self) -> WorkerProcess:
        loop = asyncio.get_running_loop()
        (their_stdin, stdin), (stderr, their_stderr) = os.pipe(), os.pipe()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stderr, "rb", 0))
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(stdin, "wb", 0))
        worker = WorkerProcess(transport, reader)
        self._asked.append(worker)
        try:
            socket.send_fds(self._control, [b"w"], [their_stdin, their_stderr])
        except OSError:  # it has ended, as `_follow` is about to hear, or has heard while the pipes were made
            log.debug("the fork server has ended")
            if self.has_ended:
                worker.exit_code.set_result(None)
        os.close(their_stdin)
        os.close(their_stderr)
        return worker

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        if not self.has_ended:
            self._control.shutdown(socket.SHUT_WR)
        await self._watch

    async def _follow(self) -> None:
        """Hear of its workers until it ends; then give up those whose end nobody will tell."""
        loop, tail = asyncio.get_running_loop(), deque[str](maxlen=TAIL_LINES)
        assert self._process.stderr is not None
        loop.add_reader(self._control, self._hear)
        async for line in lines_of(self._process.stderr):
            tail.append(line)
            log.debug("fork server: %s", line)
        await self._process.wait()
        loop.remove_reader(self._control)
        self._hear()
        self._control.close()
        self.has_ended = True
        for worker in (*self._asked, *self._forked.values()):
            worker.last_words = "\n".join(tail)
            worker.exit_code.set_result(None)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while received := self._control.recv(4096):
                self._received += received
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            pid, what = line.split()
            if what == b"started":
                worker = self._forked[int(pid)] = self._asked.popleft()
                worker.pid = int(pid)
            else:
                self._forked.pop(int(pid)).exit_code.set_result(int(what))


async def lines_of(stream: asyncio.StreamReader) -> AsyncGenerator[str, None]:
    """What a process says, by the line; a progress bar's end with a carriage return. It is read to its end whatever
    comes, as a process whose words nobody takes stands still."""
    rest = b""
    while came := await stream.read(LINE_BYTES):
        *lines, rest = (rest + came).replace(b"\r", b"\n").split(b"\n")
        if len(rest) > LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace").rstrip()
    if rest:
        yield rest.decode(errors="replace").rstrip()


def worker_command(threads: int, module: str = "tllm.node.worker", *words: str) -> tuple[list[str], dict[str, str]]:
    """The command of a worker's process, which reads its settings from stdin, and its environment."""
    source = str(Path(tllm.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {**computing_environment(os.environ), "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    return [sys.executable, "-m", module, *words], environment


def how_it_ended(code: int | None) -> str:
    """What the code says with which a process has ended, None if it is not known, in words that follow its name."""
    if code is None:
        return "ended, and so had the process that starts workers"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
