"""`HubVouching`: how the coordinator vouches for chunks of a model on the hub that neither it nor the hub has any more,
so that nodes can take them from each other."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Sequence

from tllm.cluster.certificates import Identity
from tllm.cluster.weight_messages import Bytes, ReadBytes
from tllm.core.errors import WeightsError, counted
from tllm.node.weights.file_proof import AskedNode, FileProof, LackedChunks, Proven
from tllm.node.weights.hub_folder import HubFails, HubFolder
from tllm.node.weights.model_folder import hashed
from tllm.weights.file_chunks import FileChunk, numbers

log = logging.getLogger("tllm.node")


class HubVouching:
    """`places` are the nodes that may have something, `is_held` says whether one of them is known to have a chunk by
    its hash, and `learn` is told what was made out of a file. All of one event loop."""

    def __init__(
        self,
        folder: HubFolder,
        identity: Identity,
        places: Callable[[], Sequence[AskedNode]],
        is_held: Callable[[bytes], bool],
        learn: Callable[[Proven], None],
    ) -> None:
        self._folder, self._identity = folder, identity
        self._places, self._is_held, self._learn = places, is_held, learn
        self._proving: dict[str, asyncio.Task[Proven]] = {}
        self._one = asyncio.Lock()

    async def hash_of(self, chunk: FileChunk, failure: HubFails) -> bytes:
        """The SHA-256 of a chunk that the hub does not give. WeightsError, which names layers and machines, where
        nobody has it, or where what nodes have is not the file."""
        noted = await asyncio.to_thread(self._folder.chunks.digest, chunk)
        if noted is not None and self._is_held(noted):  # it was here, and was evicted since; or was made out before
            return noted
        if chunk.file not in self._proving:
            task = self._proving[chunk.file] = asyncio.create_task(self._prove(chunk.file, failure))
            task.add_done_callback(lambda task: self._ended(chunk.file, task))
        await asyncio.shield(self._proving[chunk.file])  # others wait for it too
        return self._folder.hash_of(chunk)

    async def read(self, wanted: ReadBytes, failure: HubFails) -> Bytes:
        """Bytes of a file that neither this machine nor the hub has, as its header is where this process has taken the
        coordinator's place and had no part in the model before. Their chunks are kept. Raises what `hash_of` does."""
        chunks = self._folder.chunks
        proven = await self._prove(wanted.file, failure, numbers(wanted.start, wanted.stop, chunks.chunk_bytes))
        for number, data in proven.wanted.items():
            await asyncio.to_thread(chunks.keep, FileChunk(wanted.file, number), data)
        return hashed(chunks.read(wanted.file, wanted.start, wanted.stop, lambda chunk: proven.wanted[chunk.number]))

    async def _prove(self, name: str, failure: HubFails, wanted: Collection[int] = ()) -> Proven:
        file, repository = self._folder.chunks.repository.file(name), self._folder.chunks.repository
        assert file is not None, "it has a chunk"
        async with self._one:  # each file crosses the network once, and no two at once
            places = self._places()
            log.warning(
                "the hub does not give %s of %s (%s): what %s of it is held against its hash",
                *(name, repository, failure.message, counted(len(places), "node has", "nodes have")),
            )
            try:
                proven = await FileProof(self._folder.chunks, file, places, self._identity, wanted).run()
            except LackedChunks as lacked:
                raise await asyncio.to_thread(self._nobody, name, lacked, places, failure) from lacked
            for node in sorted(proven.wrong):
                log.error("%s has wrong bytes of %s, which are not used", node, name)
            found = {FileChunk(name, number): digest for number, digest in enumerate(proven.digests)}
            await asyncio.to_thread(self._folder.vouch, found)
            self._learn(proven)
            return proven

    def _nobody(self, name: str, lacked: LackedChunks, places: Sequence[AskedNode], failure: HubFails) -> WeightsError:
        """What to say where nobody has some chunks of a file."""
        chunks = self._folder.chunks
        what = self._folder.contents(name, lacked.numbers) or "a part"
        asked = [f"this machine ({socket.gethostname()})", *map(str, places)]
        count = f"{len(lacked.numbers)} of {counted(chunks.count(name), 'chunk')} of {name}"
        mute = f"; no answer from {', '.join(lacked.silent)}" if lacked.silent else ""
        return WeightsError(
            f"nobody has {what} of {chunks.repository} ({count}), and the hub does not give it: "
            f"{failure.message}. Asked were {', '.join(asked)}{mute}",
            "bring the hub back, or let a machine join on whose disk it is, as on one that has served it "
            "(--weights-cache) or has it in its Hugging Face cache",
        )

    def _ended(self, name: str, task: asyncio.Task[Proven]) -> None:
        del self._proving[name]
        if not task.cancelled():
            task.exception()  # whoever waits for it has it too, and it may be that nobody does any more
