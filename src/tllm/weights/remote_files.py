"""`FetchedFiles`: a model's files on a node that lacks them, gathered by the chunk from whoever has them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tllm.core.memory import amount
from tllm.weights.byte_source import Fetch, RemoteFiles, read_run
from tllm.weights.byte_spans import Spans, one_span
from tllm.weights.file_chunks import FileChunk, bounds, chunk_bytes, read_from_chunks, touched


class FetchedFiles(RemoteFiles):
    """What was announced by `expect` is fetched in whole chunks, from any node; all else from the coordinator.

    `sources`: bytes by the node that gave them. What this node had kept itself counts in `bytes_read` alone.
    """

    def __init__(self, fetch: Fetch, sizes: Mapping[str, int]) -> None:
        super().__init__(fetch, sizes)
        self.sources: dict[str, int] = {}
        self._gather = fetch
        self._chunk_bytes = chunk_bytes(sizes)
        self._expected: set[FileChunk] = set()
        self._latest: tuple[FileChunk, memoryview] = (FileChunk("", 0), memoryview(b""))

    @property
    def fetched(self) -> int:
        return self._taken + sum(self.sources.values())

    def told(self) -> str:
        """Where the bytes came from, in words."""
        kept = self.bytes_read - self.fetched
        ways = [f"{amount(count)} from {source}" for source, count in sorted(self.sources.items())]
        return ", ".join([*ways, f"{amount(self._taken)} of headers", f"{amount(kept)} kept here before"])

    def expect(self, wanted: Iterable[tuple[str, Spans]]) -> None:
        numbers = ((file, number) for file, spans in wanted for number in touched(spans, self._chunk_bytes))
        chunks = list(dict.fromkeys(FileChunk(file, number) for file, number in numbers))
        self._expected = set(chunks)
        self._gather.expect(chunks, self._sizes)

    def read(self, file: str, start: int, stop: int) -> bytes:
        if not self._is_expected(file, one_span(start, stop)):
            return super().read(file, start, stop)
        return read_run(self, file, start, stop)

    def read_spans(self, file: str, spans: Spans, out: memoryview) -> None:
        if not self._is_expected(file, spans):
            super().read_spans(file, spans, out)
            return
        read_from_chunks(spans, self._chunk_bytes, lambda number: self._chunk(FileChunk(file, number)), out)

    def _is_expected(self, file: str, spans: Spans) -> bool:
        inside = spans.nbytes > 0 and spans.stop <= self.size(file)
        return inside and all(FileChunk(file, number) in self._expected for number in touched(spans, self._chunk_bytes))

    def _chunk(self, chunk: FileChunk) -> memoryview:
        known, content = self._latest
        if known != chunk:
            data, source = self._gather.chunk(chunk)
            start, stop = bounds(chunk.number, self._chunk_bytes, self.size(chunk.file))
            assert len(data) == stop - start
            self.bytes_read += len(data)
            if source:
                self.sources[source] = self.sources.get(source, 0) + len(data)
            content = memoryview(data)
            self._latest = (chunk, content)
        return content
