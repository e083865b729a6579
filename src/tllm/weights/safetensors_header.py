"""The header of one safetensors file: dtypes and sizes of its tensors, whose bytes lie without holes up to the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tllm.core.errors import nearest
from tllm.weights.boxes import Shape
from tllm.weights.byte_source import ByteSource
from tllm.weights.dtypes import DTYPES, NAMES
from tllm.weights.header_tables import INT64_LIMIT, TableEntry, read_tables, refuse


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: bytes [start, stop) of a file, row by row."""

    file: str
    dtype: torch.dtype
    shape: Shape
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(source: ByteSource, file: str) -> dict[str, TensorEntry]:
    """The tensors of one file. WeightsError, naming the file, for anything that is not exactly as the format says."""
    tables = read_tables(source, file)
    entries = {name: _typed(file, name, entry) for name, entry in tables.tensors.items()}
    _check_tiling(file, entries, tables.data, source.size(file))
    return entries


def read_metadata(source: ByteSource, file: str) -> dict[str, str]:
    """What a file says of itself beside its tensors. WeightsError for a header that is not as the format says."""
    return read_tables(source, file).metadata


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Shape]], metadata: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """The first bytes of a file that holds these tensors one after the other, the length of the header included."""
    # Readers of the field look for this key before they take a file for torch's.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, dtype, shape in tensors:
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _typed(file: str, name: str, entry: TableEntry) -> TensorEntry:
    code, shape, start, stop = entry
    if code not in DTYPES:
        refuse(file, f"tensor {name!r} has dtype {code!r}, which is not known here", nearest(code, DTYPES))
    # Python's integers do not overflow; torch's do, so the product is bounded even where a width of 0 would hide it.
    if math.prod(max(1, width) for width in shape) * DTYPES[code].itemsize >= INT64_LIMIT:
        refuse(file, f"tensor {name!r} has shape {list(shape)}, more than memory can address")
    need = math.prod(shape) * DTYPES[code].itemsize
    if need != stop - start:
        refuse(
            file, f"tensor {name!r} of {code} {list(shape)} takes {need} bytes and its offsets give it {stop - start}"
        )
    return TensorEntry(file, DTYPES[code], shape, start, stop)


def _check_tiling(file: str, entries: dict[str, TensorEntry], data: int, size: int) -> None:
    """Each byte after the header belongs to exactly one tensor: an overlap or a hole is how a wrong offset shows."""
    at, before = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < at:
            refuse(file, f"tensor {name!r} starts at byte {entry.start}, inside {before}, which ends at {at}")
        if entry.start > at:
            refuse(file, f"bytes [{at}, {entry.start}) between {before} and {name!r} belong to no tensor")
        at, before = entry.stop, repr(name)
    if at != size:
        refuse(file, f"its tensors end at byte {at} and the file has {size}")
