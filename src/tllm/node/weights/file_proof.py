"""`FileProof`: makes out which hash each chunk of a file on the hub has where the hub is gone, from what nodes have.

The hub gives the SHA-256 of whole files alone, so no chunk can be checked by itself. But nodes say which hash each of
their chunks had when it came. All chunks of the file are read once, from whoever has them, and must together have the
hub's hash: then each hash of a chunk is right, whoever told it, and from then on any node may give the chunk. Nothing
of the file is kept but what is wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tllm.cluster.certificates import COORDINATOR, Identity
from tllm.cluster.weight_messages import ChunkFound, GetChunk, ListHubChunks
from tllm.core.errors import AuthError, ClusterError, WeightsError, counted
from tllm.core.tasks import end_tasks
from tllm.hub.repository import HubFile
from tllm.node.weights.chunk_fetcher import AHEAD, CHUNK_SECONDS, ChunkConnections
from tllm.node.weights.chunk_server import has_hash, receive_bytes
from tllm.node.weights.hub_chunks import DIGEST_BYTES, HubChunks
from tllm.weights.file_chunks import FileChunk

log = logging.getLogger("tllm.node")


class AskedNode(NamedTuple):
    """A node that is asked: its name, its machine's, and the address of its chunk server."""

    node: str
    machine: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.node} on {self.machine}" if self.machine != self.node else self.node


class LackedChunks(WeightsError):
    """Nobody who can be asked has these chunks of a file."""

    def __init__(self, numbers: Sequence[int], silent: Sequence[str]) -> None:
        super().__init__(f"nobody has {counted(len(numbers), 'chunk')}")
        self.numbers, self.silent = tuple(numbers), tuple(silent)


@dataclass
class Proven:
    """The right hash of each chunk of a file, and the nodes that have each; those that gave other bytes than they
    said, or told of other ones. `wanted` are the chunks that were wanted, by their numbers."""

    digests: list[bytes]
    holders: dict[str, set[bytes]]
    wrong: set[str]
    wanted: dict[int, bytes]


class FileProof:
    """One attempt, of one file. `told` are the hashes that each node told of, in the order of the file's chunks, b""
    where it has none; `silent` the places that did not answer. Of what is read, `wanted` chunks are kept in memory."""

    def __init__(
        self,
        chunks: HubChunks,
        file: HubFile,
        places: Sequence[AskedNode],
        identity: Identity,
        wanted: Collection[int] = (),
    ) -> None:
        self._chunks, self._file = chunks, file
        self._places = {place.node: place for place in places}
        self._connections = ChunkConnections(("", 0), identity)  # the coordinator asks itself for nothing
        self.told: dict[str, list[bytes]] = {}
        self.silent: list[str] = []
        self._wrong: set[str] = set()
        self._wanted, self._kept = frozenset(wanted), dict[int, bytes]()

    async def run(self) -> Proven:
        """Ask, read and compare. LackedChunks where nobody has a chunk, WeightsError where all have it and the whole is
        not the file."""
        try:
            self.told[COORDINATOR] = await asyncio.to_thread(self._chunks.digests, self._file.name)
            await asyncio.gather(*(self._ask(place) for place in self._places.values()))
            for left_out in self._suspects():
                digests = await self._read(left_out)
                if digests is not None:
                    return self._proven(digests)
        finally:
            await self._connections.close()
        nodes = ", ".join(self._places) or "nobody"
        raise WeightsError(
            f"{self._file.name} of {self._chunks.repository}: what this machine and {nodes} have of it does "
            f"not make up the file whose SHA-256 the hub gave, {self._file.etag}",
            "one of them has damaged bytes: bring the hub back, or the model's files to the first machine",
        )

    async def _ask(self, place: AskedNode) -> None:
        """What a node has. One that does not say is done without."""
        wanted, count = ListHubChunks(self._chunks.repository, self._file.name), self._chunks.count(self._file.name)
        try:
            channel = await self._connections.to(ChunkFound(b"", place.node, place.host, place.port))
            table = await receive_bytes(channel, wanted, count * DIGEST_BYTES, CHUNK_SECONDS)
        except (ClusterError, AuthError, WeightsError) as error:
            log.warning("%s does not say what it has of %s: %s", place.node, self._file.name, error.message)
            self.silent.append(str(place))
            return
        hashes = (table[at : at + DIGEST_BYTES] for at in range(0, count * DIGEST_BYTES, DIGEST_BYTES))
        self.told[place.node] = [digest if any(digest) else b"" for digest in hashes]

    def _suspects(self) -> Iterator[str]:
        """Whom to leave out, one after the other: first nobody, then each that tells of a chunk otherwise than another
        node."""
        yield ""
        for node, digests in self.told.items():
            others = [told for other, told in self.told.items() if other != node]
            if any(digest and any(told[n] not in (b"", digest) for told in others) for n, digest in enumerate(digests)):
                yield node

    async def _read(self, left_out: str) -> list[bytes] | None:
        """Read the whole file, but for nothing from one node; the hashes of its chunks, None if it is another file."""
        told = {node: digests for node, digests in self.told.items() if node != left_out}
        ways = [self._ways(told, number) for number in range(self._chunks.count(self._file.name))]
        if lacked := [number for number, way in enumerate(ways) if not way]:
            if left_out:
                return None
            raise LackedChunks(lacked, self.silent)
        digests, hasher = list[bytes](), self._file.hasher()
        under_way: list[asyncio.Task[tuple[bytes, bytes] | None]] = []
        try:
            for number, way in enumerate(ways):
                for ahead in range(number + len(under_way), min(number + 1 + AHEAD, len(ways))):
                    under_way.append(asyncio.create_task(self._bring(ahead, ways[ahead])))
                came = await under_way.pop(0)
                if came is None:
                    if left_out:
                        return None
                    raise LackedChunks([number], [*self.silent, *(node for node, _ in way)])
                await asyncio.to_thread(hasher.update, came[0])
                if number in self._wanted:
                    self._kept[number] = came[0]
                digests.append(came[1])
        finally:
            await end_tasks(*under_way)
        return digests if hasher.hexdigest() == self._file.etag else None

    def _ways(self, told: dict[str, list[bytes]], number: int) -> list[tuple[str, bytes]]:
        """From whom to take a chunk, and the hash that it has there: the first machine's own, then what most tell."""
        counts = Counter(digests[number] for digests in told.values() if digests[number])
        ways = [(node, digests[number]) for node, digests in told.items() if digests[number]]
        return sorted(ways, key=lambda way: (way[0] != COORDINATOR, -counts[way[1]], way[0]))

    async def _bring(self, number: int, ways: Sequence[tuple[str, bytes]]) -> tuple[bytes, bytes] | None:
        """A chunk of the hash that was told of it, and the hash; None if nobody gives it."""
        chunk = FileChunk(self._file.name, number)
        for node, digest in ways:
            if node == COORDINATOR:
                data = await asyncio.to_thread(self._chunks.kept, chunk)
            else:
                data = await self._get(node, GetChunk(chunk.file, chunk.number, digest))
            if data is None or len(data) != self._chunks.size_of(chunk):
                continue
            if await asyncio.to_thread(has_hash, data, digest):
                return data, digest
            self._wrong.add(node)
        return None

    async def _get(self, node: str, wanted: GetChunk) -> bytes | None:
        place, size = self._places[node], self._chunks.size_of(FileChunk(wanted.file, wanted.number))
        try:
            channel = await self._connections.to(ChunkFound(wanted.digest, node, place.host, place.port))
            return await receive_bytes(channel, wanted, size, CHUNK_SECONDS)
        except (ClusterError, AuthError, WeightsError) as error:
            log.warning("no weights from %s: %s", node, error.message)
            return None

    def _proven(self, digests: list[bytes]) -> Proven:
        holders = defaultdict[str, set[bytes]](set)
        for node, told in self.told.items():
            for digest, said in zip(digests, told, strict=True):
                if said == digest:
                    holders[node].add(digest)
                elif said:
                    self._wrong.add(node)
        return Proven(digests, dict(holders), self._wrong - {COORDINATOR}, self._kept)
