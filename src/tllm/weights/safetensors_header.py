"""The header of one safetensors file, read with nothing taken on trust: every size is checked before it is used.

Layout: 8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes without holes up to the end.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from tllm.core.disk import LFS_HINT, LFS_POINTER, is_lfs_pointer
from tllm.core.errors import WeightsError, nearest
from tllm.weights.boxes import Shape
from tllm.weights.byte_source import ByteSource
from tllm.weights.dtypes import DTYPES, NAMES

HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""
DIMS_LIMIT = 16
INT64_LIMIT = 2**63


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
    size = source.size(file)
    fields, _, length = _tables(source, file)
    entries = {name: _entry(file, name, value, 8 + length, size) for name, value in fields.items()}
    _check_tiling(file, entries, 8 + length, size)
    return entries


def read_metadata(source: ByteSource, file: str) -> dict[str, str]:
    """What a file says of itself beside its tensors. WeightsError for a header that is not as the format says."""
    return _tables(source, file)[1]


def _tables(source: ByteSource, file: str) -> tuple[dict[str, Any], dict[str, str], int]:
    """The header's fields of tensors, its metadata, and its length."""
    size = source.size(file)
    if size < 8:
        _refuse(file, f"it has {size} bytes and the length of its header alone takes 8")
    begins = source.read(file, 0, 8)
    if is_lfs_pointer(begins):
        raise WeightsError(f"{file} {LFS_POINTER}", LFS_HINT)
    length = int.from_bytes(begins, "little")
    if length > HEADER_LIMIT:
        _refuse(file, f"its header says it is {length} bytes long and {HEADER_LIMIT} is the most there can be")
    if length > size - 8:
        _refuse(file, f"its header says it is {length} bytes long and the file has {size - 8} bytes after that number")
    fields = _parse(file, source.read(file, 8, 8 + length))
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, "its __metadata__ is not a table of texts")
    return fields, metadata, length


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


def _parse(file: str, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            key, times = Counter(key for key, _ in pairs).most_common(1)[0]
            _refuse(file, f"its header gives {key!r} {times} times")
        return table

    try:
        fields = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"its header is not JSON ({error})")
    if not isinstance(fields, dict):
        _refuse(file, f"its header is a {type(fields).__name__} and not a table of tensors")
    return fields


def _entry(file: str, name: str, value: object, data: int, size: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(file, f"tensor {name!r} must have dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        _refuse(file, f"tensor {name!r} has dtype {code!r}, which is not known here", nearest(str(code), DTYPES))
    if not _is_counts(shape) or len(shape) > DIMS_LIMIT:
        _refuse(file, f"tensor {name!r} has shape {shape!r}, not up to {DIMS_LIMIT} whole numbers")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(file, f"tensor {name!r} has data_offsets {offsets!r}, not a start and a stop")
    start, stop = offsets
    if stop > size - data:
        _refuse(file, f"tensor {name!r} ends at byte {data + stop} and the file has {size}")
    # Python's integers do not overflow; torch's do, so the product is bounded even where a width of 0 would hide it.
    if math.prod(max(1, width) for width in shape) * DTYPES[code].itemsize >= INT64_LIMIT:
        _refuse(file, f"tensor {name!r} has shape {shape}, more than memory can address")
    need = math.prod(shape) * DTYPES[code].itemsize
    if need != stop - start:
        _refuse(file, f"tensor {name!r} of {code} {shape} takes {need} bytes and its offsets give it {stop - start}")
    return TensorEntry(file, DTYPES[code], tuple(shape), data + start, data + stop)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < INT64_LIMIT for item in value)


def _check_tiling(file: str, entries: dict[str, TensorEntry], data: int, size: int) -> None:
    """Each byte after the header belongs to exactly one tensor: an overlap or a hole is how a wrong offset shows."""
    at, before = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < at:
            _refuse(file, f"tensor {name!r} starts at byte {entry.start}, inside {before}, which ends at {at}")
        if entry.start > at:
            _refuse(file, f"bytes [{at}, {entry.start}) between {before} and {name!r} belong to no tensor")
        at, before = entry.stop, repr(name)
    if at != size:
        _refuse(file, f"its tensors end at byte {at} and the file has {size}")


def _refuse(
    file: str, why: str, hint: str = "the file is torn or was not written by safetensors; copy it again"
) -> NoReturn:
    raise WeightsError(f"{file}: {why}", hint)
