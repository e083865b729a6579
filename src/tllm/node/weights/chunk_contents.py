"""What chunks of weights hold, in words: the layers, and the tensors beside them. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial

from tllm.core.errors import TllmError, counted
from tllm.core.gguf_files import SUFFIX
from tllm.core.gguf_header import read_gguf_header
from tllm.weights.byte_source import ByteSource
from tllm.weights.file_chunks import numbers
from tllm.weights.header_tables import read_tables

LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h|blocks)\.(\d+)\.")
NAMES = 3
"""Tensors outside of the layers that are named at most."""


def contents(source: ByteSource, file: str, chunks: Collection[int], chunk_bytes: int) -> str:
    """What lies in some chunks of a file, by their numbers: "layers 2 to 5 and lm_head.weight"; "" where its header
    cannot be read, or they have no tensors."""
    try:
        tensors = list(_tensors(source, file))
    except TllmError:  # the header may be what is missing
        return ""
    wanted = set(chunks)
    held = [
        name
        for name, start, stop in tensors
        if stop > start and not wanted.isdisjoint(numbers(start, stop, chunk_bytes))
    ]
    layers = sorted({int(match[1]) for name in held if (match := LAYER.search(name))})
    others = sorted(name for name in held if not LAYER.search(name))
    more = [counted(len(others) - NAMES, "more tensor")] if len(others) > NAMES else []
    parts = [*_layers(layers), *others[:NAMES], *more]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _tensors(source: ByteSource, file: str) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) of each tensor of a file."""
    if file.endswith(SUFFIX):
        for tensor in read_gguf_header(file, source.size(file), partial(source.read, file)).tensors.values():
            yield tensor.name, tensor.start, tensor.stop
    else:
        for name, entry in read_tables(source, file).tensors.items():
            yield name, entry.start, entry.stop


def _layers(layers: list[int]) -> Iterator[str]:
    """Runs of layers: "layers 2 to 5"."""
    while layers:
        count = 1
        while count < len(layers) and layers[count] == layers[0] + count:
            count += 1
        last = layers[count - 1]
        yield f"layer {last}" if count == 1 else f"layers {layers[0]} to {last}"
        del layers[:count]
