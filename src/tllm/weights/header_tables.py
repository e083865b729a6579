"""What the header of one safetensors file says, with nothing taken on trust: every size is checked before it is used.
And which files a model has.

Layout: 8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes. No torch: a dtype is its name.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple, NoReturn

from tllm.core.disk import LFS_HINT, LFS_POINTER, is_lfs_pointer
from tllm.core.errors import WeightsError
from tllm.weights.boxes import Shape
from tllm.weights.byte_source import ByteSource, read_whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""
DIMS_LIMIT = 16
INT64_LIMIT = 2**63


class TableEntry(NamedTuple):
    """A tensor as the header has it: bytes [start, stop) of the file, which are there."""

    dtype: str
    shape: Shape
    start: int
    stop: int


class HeaderTables(NamedTuple):
    """The tensors of a file by name, what it says of itself beside them, and where the tensors' bytes begin."""

    tensors: dict[str, TableEntry]
    metadata: dict[str, str]
    data: int


def weight_files(source: ByteSource) -> list[str]:
    """The safetensors files that make up a model; others that lie beside them are not of it."""
    names = source.names()
    if SINGLE in names:
        return [SINGLE]
    return sorted(set(weight_map(source).values()) & set(names)) if INDEX in names else []


def weight_map(source: ByteSource) -> dict[str, str]:
    """Which file each tensor is in, as the index says."""
    try:
        index = json.loads(read_whole(source, INDEX, HEADER_LIMIT).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{INDEX} is not JSON ({error})", "copy the file again") from error
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise WeightsError(f"{INDEX} has no weight_map from tensor names to files", "copy the file again")
    return found


def read_tables(source: ByteSource, file: str) -> HeaderTables:
    """WeightsError, naming the file, for a header that is not as the format says."""
    size = source.size(file)
    if size < 8:
        refuse(file, f"it has {size} bytes and the length of its header alone takes 8")
    begins = source.read(file, 0, 8)
    if is_lfs_pointer(begins):
        raise WeightsError(f"{file} {LFS_POINTER}", LFS_HINT)
    length = int.from_bytes(begins, "little")
    if length > HEADER_LIMIT:
        refuse(file, f"its header says it is {length} bytes long and {HEADER_LIMIT} is the most there can be")
    if length > size - 8:
        refuse(file, f"its header says it is {length} bytes long and the file has {size - 8} bytes after that number")
    fields = _parse(file, source.read(file, 8, 8 + length))
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(file, "its __metadata__ is not a table of texts")
    tensors = {name: _entry(file, name, value, 8 + length, size) for name, value in fields.items()}
    return HeaderTables(tensors, metadata, 8 + length)


def _parse(file: str, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            key, times = Counter(key for key, _ in pairs).most_common(1)[0]
            refuse(file, f"its header gives {key!r} {times} times")
        return table

    try:
        fields = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        refuse(file, f"its header is not JSON ({error})")
    if not isinstance(fields, dict):
        refuse(file, f"its header is a {type(fields).__name__} and not a table of tensors")
    return fields


def _entry(file: str, name: str, value: object, data: int, size: int) -> TableEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(file, f"tensor {name!r} must have dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str):
        refuse(file, f"tensor {name!r} has dtype {code!r}, which is not known here")
    if not _is_counts(shape) or len(shape) > DIMS_LIMIT:
        refuse(file, f"tensor {name!r} has shape {shape!r}, not up to {DIMS_LIMIT} whole numbers")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(file, f"tensor {name!r} has data_offsets {offsets!r}, not a start and a stop")
    start, stop = offsets
    if stop > size - data:
        refuse(file, f"tensor {name!r} ends at byte {data + stop} and the file has {size}")
    return TableEntry(code, tuple(shape), data + start, data + stop)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < INT64_LIMIT for item in value)


def refuse(
    file: str, why: str, hint: str = "the file is torn or was not written by safetensors; copy it again"
) -> NoReturn:
    """WeightsError for a file that is not as the format says."""
    raise WeightsError(f"{file}: {why}", hint)
