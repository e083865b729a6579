"""`HubFetch`: how a node gets a model that is on the Hugging Face hub: its own chunks straight from there, and what it
cannot get there from other nodes. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from tllm.core.errors import ClusterError, TllmError
from tllm.hub.hub_errors import HUB_REFUSES, hub_host
from tllm.node.weights.hub_chunks import HubChunks
from tllm.weights.byte_source import Fetch
from tllm.weights.file_chunks import FileChunk, numbers, runs

log = logging.getLogger("tllm.node")

RUN_BYTES = 16 << 20
"""Of one request: enough that its way to the hub and back costs little."""
LOOK_SECONDS = 0.5
CONNECTIONS = 4
"""Requests under way at once; so many runs are in memory at most."""


class OtherNodes(Fetch, Protocol):
    """How chunks come from other nodes, and how these are told of what came from elsewhere.

    `is_dropped`: what was announced by `expect` is wanted no more.
    """

    @property
    def is_dropped(self) -> bool: ...

    def came(self, digest: bytes, nbytes: int, source: str) -> None:
        """Tell that this node has fetched a chunk from elsewhere, and can pass it on."""


class HubFetch:
    """From this disk, else from the hub, else, once the hub has failed, from other nodes for the rest of the load.

    Chunks that follow each other in a file are fetched together, and the next runs while one is used.
    """

    def __init__(self, chunks: HubChunks, others: OtherNodes) -> None:
        self._chunks, self._others = chunks, others
        self._is_reachable = True
        self._runs: list[list[FileChunk]] = []
        self._run_of: dict[FileChunk, int] = {}
        self._under_way: dict[int, Future[list[tuple[bytes, str]]]] = {}
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="hub")

    def __call__(self, file: str, start: int, stop: int) -> bytes:
        wanted = [FileChunk(file, number) for number in numbers(start, stop, self._chunks.chunk_bytes)]
        if not self._is_reachable and not all(self._chunks.is_kept(chunk) for chunk in wanted):
            return self._others(file, start, stop)
        try:
            return self._chunks.read(file, start, stop)
        except HUB_REFUSES as error:
            self._give_up(error)
            return self._others(file, start, stop)

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        self._others.expect(chunks, sizes)
        self._drop()
        self._chunks.ranges.is_stopped, self._is_reachable = False, True
        self._chunks.warn_of_room(chunks)
        missing = [chunk for chunk in chunks if not self._chunks.is_kept(chunk)]
        self._runs = list(runs(missing, max(1, RUN_BYTES // self._chunks.chunk_bytes)))
        self._run_of = {chunk: number for number, run in enumerate(self._runs) for chunk in run}

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        kept = None if chunk in self._run_of else self._chunks.kept(chunk)
        if kept is not None:
            return kept, ""
        if self._is_reachable:
            try:
                return self._from_hub(chunk)
            except HUB_REFUSES as error:
                self._give_up(error)
        data, source = self._others.chunk(chunk)
        self._chunks.note(chunk, data)
        return data, source

    def found(self, folder: Path) -> None:
        self._others.found(folder)

    def _from_hub(self, chunk: FileChunk) -> tuple[bytes, str]:
        number = self._run_of.get(chunk)
        if number is None:  # it was here, and is damaged or gone
            return self._fetched([chunk])[0]
        for ahead in range(number, min(number + CONNECTIONS, len(self._runs))):
            if ahead not in self._under_way:
                self._under_way[ahead] = self._pool.submit(self._fetched, self._runs[ahead])
        run = self._runs[number]
        data = self._result(self._under_way[number])[run.index(chunk)]
        del self._run_of[chunk]
        if chunk == run[-1]:
            del self._under_way[number]
        return data

    def _result(self, run: Future[list[tuple[bytes, str]]]) -> list[tuple[bytes, str]]:
        """What a run brought, unless it is wanted no more before it is here."""
        try:
            while not wait((run,), timeout=LOOK_SECONDS).done:
                if self._others.is_dropped:
                    raise ClusterError("what was to be loaded is wanted no more")
            return run.result()
        except BaseException:  # an interrupt too: the threads of the pool must see it
            self._chunks.ranges.is_stopped = True  # the program may end now, and would wait for its threads
            raise

    def _fetched(self, run: list[FileChunk]) -> list[tuple[bytes, str]]:
        """Each chunk and who gave it: nobody, where another program of this machine has just fetched it."""
        found = self._chunks.fetch(run)
        for piece in found:
            if piece.came:
                self._others.came(piece.digest, len(piece.data), hub_host())
        return [(piece.data, hub_host() if piece.came else "") for piece in found]

    def _give_up(self, error: TllmError) -> None:
        log.warning("weights come from other nodes from now on, and not from the hub: %s", error.message)
        self._is_reachable = False
        self._drop()

    def _drop(self) -> None:
        for run in self._under_way.values():
            run.cancel()
        self._under_way.clear()
        self._run_of.clear()
