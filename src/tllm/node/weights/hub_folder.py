"""`HubFolder`: the coordinator's side of a model on the hub. It vouches for chunks, and gives them to nodes that cannot
fetch them themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from tllm.cluster.weight_messages import ModelFileFacts
from tllm.core.errors import WeightsError
from tllm.hub.hub_errors import HUB_REFUSES
from tllm.node.weights.chunk_contents import contents
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.model_folder import ModelFolder
from tllm.weights.byte_source import RemoteFiles
from tllm.weights.file_chunks import FileChunk

ASK_AGAIN_SECONDS = 30.0
"""After the hub has failed it is not asked again for so long: an attempt may take as long, and nodes wait meanwhile."""


class HubFails(WeightsError):
    """A chunk is not on this machine's disk, and the hub does not give it."""


class HubFolder(ModelFolder):
    """A chunk that a node asks for is taken from this machine's disk, else fetched from the hub, and its hash made of
    that. What no node asks for is never fetched. `path` holds config and tokenizer; `chunks` is what is here."""

    def __init__(self, path: Path, chunks: HubChunks) -> None:
        self.path, self.chunks = path, chunks
        self._failed, self._why = -math.inf, ""
        self._source = self._files()
        files = chunks.repository.files
        self._share(tuple(ModelFileFacts(file.name, file.size, bytes.fromhex(file.etag)) for file in files))

    def is_another_base(self, trained_beside: str) -> bool:
        return False  # it is not looked at: most of its tensors are not on this disk

    def contents(self, file: str, numbers: Collection[int]) -> str:
        return contents(self._files(), file, numbers, self._chunk_bytes)  # a reader of its own: `_source` is locked

    def vouch(self, digests: Mapping[FileChunk, bytes]) -> None:
        """From now on vouch for these hashes of chunks, which were made out in another way; also after a restart."""
        for chunk, digest in digests.items():
            self.chunks.note_digest(chunk, digest)
        self._hashes |= digests

    def _files(self) -> RemoteFiles:
        return RemoteFiles(partial(self.chunks.read, take=self.chunk), self.chunks.sizes)

    def _read_chunk(self, chunk: FileChunk, start: int, stop: int) -> bytes:
        """Several at once, and headers beside them, as the hub may be slow."""
        if time.monotonic() - self._failed < ASK_AGAIN_SECONDS:
            kept = self.chunks.kept(chunk)
            if kept is None:
                raise HubFails(self._why)
            return kept
        try:
            return self.chunks.chunk(chunk)
        except HUB_REFUSES as error:
            self._failed, self._why = time.monotonic(), error.message
            raise HubFails(error.message, error.hint) from error
