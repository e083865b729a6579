"""`WeightRegistry`: the coordinator's side of weights that nodes lack. It says who has a chunk, and serves chunks of
its own files."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, get_args

import msgspec

from tllm.cluster.certificates import COORDINATOR, Identity
from tllm.cluster.channel import Act, Channel
from tllm.cluster.messages import Message
from tllm.cluster.weight_messages import (
    Bytes,
    ChunkFound,
    ChunkReceived,
    GetChunk,
    HoldsChunks,
    LocateChunk,
    Pending,
    ReadBytes,
)
from tllm.core.errors import ClusterError, WeightsError
from tllm.node.coordinator.chunk_registry import ChunkRegistry, far_by
from tllm.node.coordinator.membership import Membership
from tllm.node.weights.adapter_registry import AdapterRegistry
from tllm.node.weights.chunk_server import PENDING_SECONDS, chunk_messages, pending
from tllm.node.weights.file_proof import AskedNode, Proven
from tllm.node.weights.hub_folder import HubFails, HubFolder
from tllm.node.weights.hub_vouching import HubVouching
from tllm.node.weights.model_folder import ModelFolder
from tllm.planner.measured.survey import Survey
from tllm.spec.process_groups import RoleName
from tllm.weights.file_chunks import FileChunk

log = logging.getLogger("tllm.node")

READS = 4
"""Chunks that are read from the disk at the same time, whoever asks for them."""


class WeightRegistry:
    """`here` names the nodes of this machine, which read the same files as the coordinator. Without a `folder` every
    request is refused, but for files of models that nodes have `beside` it, by their role.

    Which nodes are near each other follows from the machines that they run on and, once there is one, from the
    `survey`. A node that waits for another node's fetch of a chunk is woken by news of that chunk alone: of thousands
    of nodes that load, most wait for others. By its `identity` the coordinator asks nodes for what the hub gives no
    more.
    """

    def __init__(
        self, folder: ModelFolder | None, members: Membership, here: set[str], identity: Identity | None = None
    ) -> None:
        self.folder, self._members, self._here = folder, members, here
        self.survey: Survey | None = None
        self.catalogue = ChunkRegistry()
        self.adapters = AdapterRegistry()
        self.beside: dict[str, ModelFolder] = {}
        self._reads = asyncio.Semaphore(READS)
        self._news: dict[bytes, asyncio.Event] = {}  # of chunks that are waited for
        self._vouching: HubVouching | None = None
        if isinstance(folder, HubFolder) and identity is not None:
            self._vouching = HubVouching(folder, identity, self._places, self.catalogue.is_held, self._learn)

    def begin(self) -> None:
        """A new epoch: no load is under way any more, and distances are between the nodes that are here now."""
        self.catalogue.begin()
        machines = {member.node: member.facts.host_name for member in self._members.state.living}
        self.catalogue.far = far_by({**machines, COORDINATOR: socket.gethostname()}, self.survey)
        self._wake(tuple(self._news))

    def forget(self, node: str) -> None:
        """A node is gone."""
        self.catalogue.forget(node)
        self._wake(tuple(self._news))

    def report(self) -> dict[str, Any]:
        """Bytes of weights that each node has fetched from another so far, and who gave wrong ones, for JSON."""
        brought = sorted(self.catalogue.brought.items())
        transfers = [{"node": node, "source": source, "bytes": count} for (node, source), count in brought]
        return {"brought": transfers, "liars": sorted(self.catalogue.liars)}

    def stats(self) -> dict[str, float]:
        """Bytes of weights that each node has fetched from another, and how many nodes gave wrong ones, as metrics."""
        brought = self.catalogue.brought.items()
        transfers = {f"weights_bytes/{node}/{source}": float(count) for (node, source), count in brought}
        return {**transfers, "weights_liars": float(len(self.catalogue.liars))}

    def acts(self, node: str) -> Mapping[type, Act]:
        """What to do with a node's messages about weights."""

        async def read(message: ReadBytes) -> Bytes:
            if (of_adapter := self.adapters.read(message)) is not None:
                return of_adapter
            role, _, file = message.file.partition("/")
            if file and role in get_args(RoleName):  # a rollout server's model is the one that is trained
                message = msgspec.structs.replace(message, file=file)
                if role != "rollout" and role not in self.beside:
                    raise WeightsError(f"no files of the {role} are here yet", "the role is to be given anew")
            folder = self.beside.get(role) or self._folder_for(node, message.file)
            try:
                return await asyncio.to_thread(folder.read, message)
            except HubFails as error:
                if self._vouching is None or folder is not self.folder:
                    raise
                return await self._vouching.read(message, error)

        async def holds(message: HoldsChunks) -> None:
            has_files = message.files and node not in self._here
            self.catalogue.holds(node, message.digests, has_files)
            self._wake(tuple(self._news) if has_files else message.digests)

        async def came(message: ChunkReceived) -> None:
            self.catalogue.came(node, message.digest, message.nbytes, message.source, message.kept)
            self._wake((message.digest,))

        def locate(message: LocateChunk) -> AsyncGenerator[Message, None]:
            return self._locate(node, message)

        return {ReadBytes: read, HoldsChunks: holds, ChunkReceived: came, LocateChunk: locate}

    async def serve_chunks(self, channel: Channel, node: str) -> None:
        """Serve chunks on a connection that is for nothing else, until it closes."""

        async def read(message: GetChunk) -> bytes:
            async with self._reads:
                folder = self._folder_for(node, message.file)
                return await asyncio.to_thread(folder.chunk, FileChunk(message.file, message.number))

        await channel.run({GetChunk: lambda message: chunk_messages(read(message))})

    async def _locate(self, node: str, wanted: LocateChunk) -> AsyncGenerator[Message, None]:
        chunk = FileChunk(wanted.file, wanted.number)
        # Of a model on the hub the chunk may have to be fetched first, and others before it, which may take long.
        hashing = asyncio.create_task(self._hash_of(node, chunk))
        async with aclosing(pending(hashing, Pending())) as messages:
            async for message in messages:
                yield message
        digest = hashing.result()
        if wanted.failed:
            self._note_failure(node, wanted, digest)
        while (source := self._source(node, wanted, digest)) is None:
            if not await self._hears_of(digest):
                yield Pending()
        if not source:
            words = await asyncio.to_thread(self._folder_for(node, chunk.file).contents, chunk.file, (chunk.number,))
            raise WeightsError(
                f"nobody is left who gives {node} chunk {wanted.number} of {wanted.file}{words and f' ({words})'}; "
                f"{wanted.failed} did not last",
                "see the warnings above; bring the model's files back, or let a node join that has them",
            )
        if source in (COORDINATOR, node):
            yield ChunkFound(digest, source)
        else:
            member = self._members.state.member(source)
            assert member is not None, "who is lost is forgotten"
            yield ChunkFound(digest, source, member.facts.host, member.facts.lends)

    def _source(self, node: str, wanted: LocateChunk, digest: bytes) -> str | None:
        if wanted.epoch != self._members.state.epoch:  # else it would wait in vain
            raise ClusterError(f"epoch {wanted.epoch} is over")
        return self.catalogue.source(node, digest, time.monotonic())

    async def _hash_of(self, node: str, chunk: FileChunk) -> bytes:
        try:
            async with self._reads:
                return await asyncio.to_thread(self._folder_for(node, chunk.file).hash_of, chunk)
        except HubFails as error:
            if self._vouching is None:
                raise
            return await self._vouching.hash_of(chunk, error)

    def _places(self) -> list[AskedNode]:
        """Where chunks may be."""
        facts = [member.facts for member in self._members.state.living]
        return [AskedNode(one.node, one.host_name, one.host, one.lends) for one in facts if one.lends]

    def _learn(self, proven: Proven) -> None:
        """What was made out of a file of the hub."""
        living = {member.node for member in self._members.state.living}
        for node in proven.holders.keys() & living:
            self.catalogue.holds(node, proven.holders[node])
        self.catalogue.liars |= proven.wrong
        self._wake(proven.digests)

    def _note_failure(self, node: str, wanted: LocateChunk, digest: bytes) -> None:
        words = {"lacks": "has no", "broke": "could not be reached for", "lied": "gave wrong bytes for"}[wanted.why]
        log.warning("%s %s chunk %d of %s, says %s", wanted.failed, words, wanted.number, wanted.file, node)
        self.catalogue.failed(node, digest, wanted.failed, wanted.why)
        self._wake((digest,))

    def _folder_for(self, node: str, file: str) -> ModelFolder:
        if self.folder is None:
            raise ClusterError(f"{node} asks for {file[:80]!r} of a model that has no files")
        return self.folder

    async def _hears_of(self, digest: bytes) -> bool:
        """Wait for news of a chunk, for PENDING_SECONDS at most; whether there were any."""
        news = self._news.setdefault(digest, asyncio.Event())
        try:
            async with asyncio.timeout(PENDING_SECONDS):
                return await news.wait()
        except TimeoutError:
            return False

    def _wake(self, digests: Iterable[bytes]) -> None:
        """Something may be otherwise for those who wait for these chunks."""
        for digest in digests:
            if (news := self._news.pop(digest, None)) is not None:
                news.set()
