"""Workers as processes of this machine: started, listened to, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

import tllm
from tllm.cluster.connection import Address
from tllm.cluster.join_token import JoinToken
from tllm.core.memory import huge_page_environment
from tllm.hub.repository import HubWeights

log = logging.getLogger("tllm.node")

TAIL_LINES = 20
END_SECONDS = 5.0
SOON_SECONDS, AGAIN_SECONDS = 20.0, 5.0
"""A worker that twice in a row ends within the first time is started again after the second, any other at once."""

OnEnd = Callable[[str, str, str], None]
"""on_end(node, how it ended, its last lines)"""


class LocalWorker:
    """One worker process. It reads its settings, token included, from stdin, and ends when stdin closes, as it does
    when this process has ended."""

    def __init__(self, node: str, process: asyncio.subprocess.Process, on_end: OnEnd) -> None:
        self.node = node
        self.process = process
        self.started = time.monotonic()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_end = on_end
        self.watch = asyncio.create_task(self._watch(), name=f"worker {node}")

    async def end(self) -> None:
        """Wait for its own end a little, then kill it."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await asyncio.shield(self.watch)
        except TimeoutError:
            log.warning("worker %s did not end within %g s and is killed", self.node, END_SECONDS)
            self.kill()
            await self.watch

    def kill(self) -> None:
        """End it and all that it started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _watch(self) -> None:
        assert self.process.stderr is not None and self.process.stdin is not None
        async for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            log.debug("%s: %s", self.node, text)
        code = await self.process.wait()
        self.process.stdin.close()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._on_end(self.node, how, "\n".join(self._tail))


class LocalWorkers:
    """Workers of this machine by name. After `renew`, one that ends is started again under its name.

    All of them together may use `memory` bytes, or all of the machine's if None; on a `device` that is not the
    processor, each so much of its own. Weights of a model on the `hub` are kept where it says.
    """

    def __init__(
        self,
        address: Address,
        token: Callable[[], JoinToken],
        threads: int,
        on_end: OnEnd,
        memory: int | None = None,
        hub: HubWeights | None = None,
        device: str = "cpu",
    ) -> None:
        self._address, self._token, self._threads, self._on_end = address, token, threads, on_end
        self._room: dict[str, Any] = dict(memory=memory, is_shared=True, runs_own_code=True, device=device)
        if hub is not None:
            self._room |= dict(weights_cache=hub.cache, weights_cache_bytes=hub.cache_bytes)
        self._places: dict[str, int] = {}  # each worker's number among them, which chooses its device
        self._workers: dict[str, LocalWorker] = {}
        self._renewing: dict[str, asyncio.Task[None]] = {}
        self._short: set[str] = set()  # workers whose last process ended soon
        self._at_hand: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._is_renewed = self._is_ending = False

    @property
    def names(self) -> Collection[str]:
        return self._workers.keys()

    async def start(self, node: str) -> None:
        """Start a worker by this name."""
        process = await self._process()
        assert process.stdin is not None
        host, port = self._address
        place = self._places.setdefault(node, len(self._places))
        settings = dict(host=host, port=port, token=str(self._token()), node=node, threads=self._threads, place=place)
        process.stdin.write(msgspec.json.encode({**settings, **self._room}) + b"\n")
        self._workers[node] = LocalWorker(node, process, self._ended)

    def renew(self, at_hand: bool = False) -> None:
        """From now on start a new process for each worker that ends. With `at_hand` one more process is always started
        in advance, so that it can take over at once."""
        self._is_renewed = True
        if at_hand:
            self._at_hand = asyncio.create_task(_start(self._threads), name="worker at hand")

    def renew_no_more(self) -> None:
        """Start nothing for workers that end from now on."""
        self._is_renewed = False

    def kill(self, node: str) -> None:
        """End a worker that is of no use any more, now."""
        self._workers[node].kill()

    async def end(self) -> None:
        """Wait a little for each worker's own end, then kill it."""
        self._is_ending = True
        for task in self._renewing.values():
            task.cancel()
        await asyncio.gather(*self._renewing.values(), return_exceptions=True)
        await asyncio.gather(self._drop(), *(worker.end() for worker in self._workers.values()))

    def kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _ended(self, node: str, how: str, tail: str) -> None:
        self._on_end(node, how, tail)
        if self._is_renewed and not self._is_ending:
            is_short = time.monotonic() - self._workers[node].started < SOON_SECONDS
            seconds = AGAIN_SECONDS if is_short and node in self._short else 0.0
            self._short = self._short | {node} if is_short else self._short - {node}
            self._renewing[node] = asyncio.create_task(self._renew(node, seconds), name=f"renew {node}")

    async def _renew(self, node: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.info("starts worker %s again", node)
        await self.start(node)

    async def _process(self) -> asyncio.subprocess.Process:
        """A process without settings yet: the one at hand, which another one then follows, or a new one."""
        if self._at_hand is None:
            return await _start(self._threads)
        process = await asyncio.shield(self._at_hand)  # if we are cancelled, `_drop` still finds it
        self._at_hand = asyncio.create_task(_start(self._threads), name="worker at hand")
        return process if process.returncode is None else await _start(self._threads)

    async def _drop(self) -> None:
        """End the process that is at hand."""
        if self._at_hand is not None:
            process = await self._at_hand
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@contextlib.asynccontextmanager
async def local_workers(nodes: list[str], workers: LocalWorkers) -> AsyncIterator[LocalWorkers]:
    """Start one of the workers for each name; on leaving, those that do not end by themselves are killed."""
    try:
        for node in nodes:
            await workers.start(node)
        yield workers
    except BaseException:
        workers.kill_all()
        raise
    finally:
        await workers.end()


async def _start(threads: int) -> asyncio.subprocess.Process:
    """A worker's process, which waits for its settings."""
    source = str(Path(tllm.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tllm.node.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**huge_page_environment(os.environ), "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        start_new_session=True,  # Ctrl-C is for us; we then end them in order
        limit=2**20,
    )
