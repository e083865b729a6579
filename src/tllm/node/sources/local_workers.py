"""Workers as processes of this machine: started, listened to, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import msgspec

from tllm.cluster.connection import Address
from tllm.cluster.join_token import JoinToken
from tllm.core.disk import print_line
from tllm.core.tasks import background, end_tasks
from tllm.hub.repository import HubWeights
from tllm.node.machine.printed_lines import MARK
from tllm.node.machine.suspension import following_suspension
from tllm.node.sources.worker_forks import TAIL_LINES, WorkerForks, WorkerProcess, how_it_ended, lines_of
from tllm.node.topology.numa_binding import BoundRanks

log = logging.getLogger("tllm.node")

END_SECONDS = 15.0
"""What the own end of a worker may take. Several that end at once on few cores, beside other work, took more than 5."""

SOON_SECONDS, AGAIN_SECONDS = 20.0, 5.0
"""A worker that twice in a row ends within the first time is started again after the second, any other at once."""

OnEnd = Callable[[str, str, str], None]
"""on_end(node, how it ended, its last lines)"""


class LocalWorker:
    """One worker process. It reads its settings, token included, from stdin, and ends when stdin closes, as it does
    when this process has ended."""

    def __init__(self, node: str, process: WorkerProcess, on_end: OnEnd) -> None:
        self.node = node
        self.process = process
        self.started = time.monotonic()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_end, self._is_killed = on_end, False
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
        self._is_killed = True
        self.process.kill()

    async def _watch(self) -> None:
        async for text in lines_of(self.process.stderr):
            self._tail.append(text)
            level, _, said = text.partition(" ")
            if level == "WARNING":  # of this machine, as a full disk; what a worker fails by comes as its answer
                log.warning("%s: %s", self.node, said)
            elif level == MARK:  # by a function of the user's
                print_line(said)
            else:
                log.debug("%s: %s", self.node, text)
        code = await self.process.exit_code
        self.process.stdin.close()
        if code is None:
            self._tail.append(self.process.last_words)
        is_ours = code is None and self._is_killed  # as was then the process that starts workers
        self._on_end(self.node, "was ended" if is_ours else how_it_ended(code), "\n".join(self._tail))


@dataclass(frozen=True)
class WorkersRoom:
    """What the workers of this machine have of it: so many threads each, and the processors that each is `bound` to.

    All of them together may use `memory` bytes, or all of the machine's if None; on a `device` that is not the
    processor, each so much of its own. Weights of a model on the `hub` are kept where it says. Other nodes reach them
    at `host`.
    """

    threads: int
    memory: int | None = None
    hub: HubWeights | None = None
    device: str = "cpu"
    bound: BoundRanks = field(default_factory=BoundRanks)
    host: str = ""


class LocalWorkers:
    """Workers of this machine by name. After `renew`, one that ends is started again under its name."""

    def __init__(self, address: Address, token: Callable[[], JoinToken], on_end: OnEnd, room: WorkersRoom) -> None:
        self._address, self._token, self._on_end = address, token, on_end
        self._forks = WorkerForks(room.threads)
        self._bound, hub = room.bound, room.hub
        self._room: dict[str, Any] = dict(memory=room.memory, is_shared=True, device=room.device, threads=room.threads)
        self._room |= dict(listen=room.host, runs_own_code=True, ends_with_starter=True)
        if hub is not None:
            self._room |= dict(weights_cache=hub.cache, weights_cache_bytes=hub.cache_bytes)
        self._places: dict[str, int] = {}  # each worker's number among them: which chooses its device and processors
        self._workers: dict[str, LocalWorker] = {}
        self._renewing: dict[str, asyncio.Task[None]] = {}
        self._short: set[str] = set()  # workers whose last process ended soon
        self._is_renewed = self._is_ending = False

    @property
    def names(self) -> Collection[str]:
        return self._workers.keys()

    async def start(self, node: str) -> None:
        """Start a worker by this name."""
        process = await self._forks.start()
        host, port = self._address
        place = self._places.setdefault(node, len(self._places))
        settings = dict(host=host, port=port, token=str(self._token()), node=node, place=place)
        settings |= dict(processors=self._bound.of(place))
        process.stdin.write(msgspec.json.encode({**settings, **self._room}) + b"\n")
        self._workers[node] = LocalWorker(node, process, self._ended)

    def renew(self) -> None:
        """From now on start a new process for each worker that ends."""
        self._is_renewed = True

    def renew_no_more(self) -> None:
        """Start nothing for workers that end from now on."""
        self._is_renewed = False

    def kill(self, node: str) -> None:
        """End a worker that is of no use any more, now."""
        self._workers[node].kill()

    async def end(self) -> None:
        """Wait a little for each worker's own end, then kill it."""
        self._is_ending = True
        await end_tasks(*self._renewing.values())
        await asyncio.gather(*(worker.end() for worker in self._workers.values()))
        await self._forks.close()

    def signal(self, number: Signals) -> None:
        """Send a signal to all of them."""
        self._forks.signal(number)

    def kill_all(self) -> None:
        self._forks.kill()
        for worker in self._workers.values():
            worker.kill()

    def _ended(self, node: str, how: str, tail: str) -> None:
        self._on_end(node, how, tail)
        if self._is_renewed and not self._is_ending:
            is_short = time.monotonic() - self._workers[node].started < SOON_SECONDS
            seconds = AGAIN_SECONDS if is_short and node in self._short else 0.0
            self._short = self._short | {node} if is_short else self._short - {node}
            self._renewing[node] = background(self._renew(node, seconds), f"the start of worker {node}")

    async def _renew(self, node: str, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            log.info("starts worker %s again", node)
            try:
                await self.start(node)
                return
            except OSError as error:  # no memory or descriptor left, which may be otherwise soon
                log.warning("worker %s cannot be started: %s", node, error.strerror)
                seconds = AGAIN_SECONDS


@contextlib.asynccontextmanager
async def local_workers(nodes: list[str], workers: LocalWorkers) -> AsyncIterator[LocalWorkers]:
    """Start one of the workers for each name; on leaving, those that do not end by themselves are killed."""
    try:
        with following_suspension(workers.signal):  # else they would compute on, and then miss their coordinator
            for node in nodes:
                await workers.start(node)
            yield workers
    except BaseException:
        workers.kill_all()
        raise
    finally:
        await workers.end()
