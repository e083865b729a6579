"""`WeightRegistry`: the coordinator's side of weights that nodes lack: what they are, who has them, and giving them
out."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tllm.cluster.certificates import COORDINATOR
from tllm.cluster.channel import Act, Channel
from tllm.cluster.messages import (
    Bytes,
    ChunkFound,
    ChunkReceived,
    GetChunk,
    HoldsChunks,
    LocateChunk,
    Message,
    Pending,
    ReadBytes,
)
from tllm.core.errors import ClusterError, WeightsError
from tllm.node.coordinator.chunk_registry import ChunkRegistry, far_by
from tllm.node.coordinator.membership import Membership
from tllm.node.weights.chunk_server import chunk_messages
from tllm.node.weights.model_folder import ModelFolder
from tllm.planner.measured.survey import Survey
from tllm.weights.file_chunks import FileChunk

log = logging.getLogger("tllm.node")

PENDING_SECONDS = 5.0
"""A node that waits for another is told so as often: it knows that we are here."""

READS = 4
"""Chunks that are read from the disk at once, whoever asks."""


class WeightRegistry:
    """`here`: nodes of this machine, whose files are ours. Without a `folder` nobody can ask for anything.

    By the `survey`, once there is one, and by their machines those are found that are near each other.
    Whoever waits for another node to bring something is woken with everyone who waits for the members to change.
    """

    def __init__(self, folder: ModelFolder | None, members: Membership, here: set[str]) -> None:
        self.folder, self._members, self._here = folder, members, here
        self.survey: Survey | None = None
        self.catalogue = ChunkRegistry()
        self._reads = asyncio.Semaphore(READS)

    def begin(self) -> None:
        """A new epoch: nobody loads any more, and those that load now are here."""
        self.catalogue.begin()
        machines = {member.node: member.facts.host_name for member in self._members.state.living}
        self.catalogue.far = far_by({**machines, COORDINATOR: socket.gethostname()}, self.survey)

    def forget(self, node: str) -> None:
        """A node is gone."""
        self.catalogue.forget(node)

    def report(self) -> dict[str, Any]:
        """Bytes of weights that each node took from another so far, and who gave wrong ones, as JSON takes it."""
        brought = sorted(self.catalogue.brought.items())
        ways = [{"node": node, "source": source, "bytes": count} for (node, source), count in brought]
        return {"brought": ways, "liars": sorted(self.catalogue.liars)}

    def stats(self) -> dict[str, float]:
        """Bytes of weights that each node took from another, and how many nodes gave wrong ones."""
        brought = self.catalogue.brought.items()
        ways = {f"weights_bytes/{node}/{source}": float(count) for (node, source), count in brought}
        return {**ways, "weights_liars": float(len(self.catalogue.liars))}

    def acts(self, node: str) -> Mapping[type, Act]:
        """What is done with a node's messages."""

        async def read(message: ReadBytes) -> Bytes:
            folder = self._having(node, message.file)
            return await asyncio.to_thread(folder.read, message)

        async def holds(message: HoldsChunks) -> None:
            self.catalogue.holds(node, message.digests, message.files and node not in self._here)
            await self._members.notify()

        async def came(message: ChunkReceived) -> None:
            self.catalogue.came(node, message.digest, message.nbytes, message.source, message.kept)
            await self._members.notify()

        def seek(message: LocateChunk) -> AsyncIterator[Message]:
            return self._seek(node, message)

        return {ReadBytes: read, HoldsChunks: holds, ChunkReceived: came, LocateChunk: seek}

    async def serve_chunks(self, channel: Channel, node: str) -> None:
        """Give chunks on a connection that is for nothing else, until it closes."""

        async def read(message: GetChunk) -> bytes:
            async with self._reads:
                folder = self._having(node, message.file)
                return await asyncio.to_thread(folder.chunk, FileChunk(message.file, message.number))

        await channel.run({GetChunk: lambda message: chunk_messages(read(message))})

    async def _seek(self, node: str, wanted: LocateChunk) -> AsyncIterator[Message]:
        chunk = FileChunk(wanted.file, wanted.number)
        async with self._reads:
            digest = await asyncio.to_thread(self._having(node, wanted.file).hash_of, chunk)
        if wanted.failed:
            await self._note_failure(node, wanted, digest)
        while (source := self._source(node, wanted, digest)) is None:
            yield Pending()
            await self._pause()
        if not source:
            raise WeightsError(
                f"nobody is left who gives {node} chunk {wanted.number} of {wanted.file}; {wanted.failed} did not last",
                "see the warnings above; bring the model's files back, or let a node join that has them",
            )
        if source in (COORDINATOR, node):
            yield ChunkFound(digest, source)
        else:
            member = self._members.state.member(source)
            assert member is not None, "who is lost is forgotten"
            yield ChunkFound(digest, source, member.facts.host, member.facts.lends)

    def _source(self, node: str, wanted: LocateChunk, digest: bytes) -> str | None:
        if wanted.epoch != self._members.state.epoch:  # or it would be waited for in vain
            raise ClusterError(f"epoch {wanted.epoch} is over")
        return self.catalogue.source(node, digest, time.monotonic())

    async def _note_failure(self, node: str, wanted: LocateChunk, digest: bytes) -> None:
        words = {"lacks": "has no", "broke": "could not be reached for", "lied": "gave wrong bytes for"}[wanted.why]
        log.warning("%s %s chunk %d of %s, says %s", wanted.failed, words, wanted.number, wanted.file, node)
        self.catalogue.failed(node, digest, wanted.failed, wanted.why)
        await self._members.notify()

    def _having(self, node: str, file: str) -> ModelFolder:
        if self.folder is None:
            raise ClusterError(f"{node} asks for {file[:80]!r} of a model that has no files")
        return self.folder

    async def _pause(self) -> None:
        """Until something changes, or for PENDING_SECONDS."""
        try:
            async with asyncio.timeout(PENDING_SECONDS), self._members.changed:
                await self._members.changed.wait()
        except TimeoutError:
            return
