"""`HubFolder`: the coordinator's side of a model on the hub. It vouches for chunks, and gives them to nodes that cannot
fetch them themselves."""

from __future__ import annotations

from pathlib import Path

from tllm.cluster.weight_messages import ModelFileFacts
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.model_folder import ModelFolder
from tllm.weights.byte_source import RemoteFiles
from tllm.weights.file_chunks import FileChunk


class HubFolder(ModelFolder):
    """A chunk that a node asks for is taken from this machine's disk, else fetched from the hub, and its hash made of
    that. What no node asks for is never fetched. `path` holds config and tokenizer."""

    def __init__(self, path: Path, chunks: HubChunks) -> None:
        self.path, self._chunks = path, chunks
        self._source = RemoteFiles(chunks.read, chunks.sizes)
        files = chunks.repository.files
        self._share(tuple(ModelFileFacts(file.name, file.size, bytes.fromhex(file.etag)) for file in files))

    def is_another_base(self, trained_beside: str) -> bool:
        return False  # it is not looked at: most of its tensors are not on this disk

    def _read_chunk(self, chunk: FileChunk, start: int, stop: int) -> bytes:
        return self._chunks.chunk(chunk)  # several at once, and headers beside them: the hub may be slow
