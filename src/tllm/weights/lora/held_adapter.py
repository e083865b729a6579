"""`HeldAdapter`: a whole adapter in memory, as whoever lends it to others keeps it.

What was loaded once can then be loaded again on other nodes, whatever has become of its folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tllm.core.errors import WeightsError
from tllm.weights.byte_source import LocalFiles
from tllm.weights.byte_spans import Spans
from tllm.weights.lora.adapter_files import ADAPTER_FILES, Adapter, check_rank, read_adapter
from tllm.weights.lora.stacked_experts import taken_apart

ID_BYTES = 16
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class HeldFiles:
    """A `ByteSource` over files whose bytes are in memory. One serves one rank."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.contents = contents
        self.bytes_read = 0

    def names(self) -> list[str]:
        return sorted(self.contents)

    def size(self, file: str) -> int:
        return len(self._content(file))

    def read(self, file: str, start: int, stop: int) -> bytes:
        content = self._content(file)
        if not 0 <= start <= stop <= len(content):
            raise WeightsError(f"bytes [{start}, {stop}) were asked for of {file[:80]}: it has {len(content)}")
        self.bytes_read += stop - start
        return content[start:stop]

    def read_spans(self, file: str, spans: Spans, out: memoryview) -> None:
        for i in range(spans.count):
            start = spans.start + i * spans.pitch
            out[i * spans.width : (i + 1) * spans.width] = self.read(file, start, start + spans.width)

    def expect(self, wanted: Iterable[tuple[str, Spans]]) -> None:
        """Does nothing: everything is here."""

    def _content(self, file: str) -> bytes:
        if file not in self.contents:
            raise WeightsError(f"{file[:80]!r} is no file of this adapter")
        return self.contents[file]


@dataclass(frozen=True)
class HeldAdapter:
    """An adapter by the name that requests give, where it came from, its files, and what they say."""

    name: str
    path: str
    contents: Mapping[str, bytes]
    adapter: Adapter

    @classmethod
    def read(cls, name: str, folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> HeldAdapter:
        """An adapter of PEFT's in a folder, checked against the adaptable modules of a model before it is read whole.

        WeightsError for what is not one, or not of this model; ConfigError for a larger rank than `max_rank`.
        """
        source = LocalFiles(folder)
        contents = taken_apart(source, shapes)
        if contents is None:
            _check(read_adapter(source), shapes, max_rank)
            contents = {file: source.read(file, 0, source.size(file)) for file in ADAPTER_FILES}
        # What was read is looked at once more: the folder may have changed meanwhile.
        adapter = read_adapter(HeldFiles(contents))
        _check(adapter, shapes, max_rank)
        return cls(name, str(folder), contents, adapter)

    @cached_property
    def lora(self) -> str:
        """Its id, in which its name and every byte of its files count: another adapter never has it."""
        digest = hashlib.sha256(hashlib.sha256(self.name.encode()).digest())
        for file in ADAPTER_FILES:
            digest.update(hashlib.sha256(self.contents[file]).digest())
        return digest.hexdigest()[: 2 * ID_BYTES]

    def elements(self, layers: range) -> int:
        """Numbers of its tensors in some layers, whole ones: a rank of a tensor-parallel group may hold fewer."""
        entries = self.adapter.index.entries
        numbers = {name: int(found[1]) for name in entries if (found := LAYER.match(name))}
        return sum(
            entry.nbytes // entry.dtype.itemsize for name, entry in entries.items() if numbers.get(name) in layers
        )


def _check(adapter: Adapter, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> None:
    check_rank(adapter, max_rank)
    adapter.check(shapes)
