"""The header of a GGUF file, read with nothing taken on trust: every count, length and offset is checked before use.

Layout, little-endian: "GGUF", u32 version, u64 number of tensors, u64 number of key-value pairs; the pairs (a name, a
u32 type, a value); the tensors (a name, u32 number of dims, u64 dims with the fastest first, u32 type, u64 offset);
zeros up to a multiple of `general.alignment`; then the tensors' bytes. A text is a u64 length and that much UTF-8.
Source: the GGUF specification (ggml/docs/gguf.md). No torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from tllm.core.disk import LFS_HINT, LFS_POINTER, is_lfs_pointer
from tllm.core.errors import WeightsError

Read = Callable[[int, int], bytes]
"""read(start, stop) -> those bytes of the file."""

MAGIC = b"GGUF"
HEADER_LIMIT = 256 * 1024 * 1024
"""Bytes. Headers hold the vocabulary: those of today's models have up to 20 MB."""
STEP = 1024 * 1024
"""Bytes that are read at once."""
NAME_LIMIT = 65535
"""Bytes of a name; the format's own limit."""
DIMS_LIMIT = 4
ALIGNMENT_LIMIT = 1024 * 1024
INT64_LIMIT = 2**63

TEXT, ARRAY = 8, 9
NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""How `struct` calls each type of a value that is a number or a truth."""


@dataclass(frozen=True)
class BlockType:
    """How a tensor's numbers are kept: `elements` neighbours of a row in `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}
"""Every type by its number in files. Which of them are read is for whoever reads the tensors."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: bytes [start, stop) of a file, row by row. `shape` has the rows' width last."""

    name: str
    file: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GgufArray:
    """A list of the metadata, decoded when it is asked for: vocabularies are long, and most readers need none."""

    file: str
    key: str
    kind: int
    count: int
    _header: bytearray
    _start: int

    def values(self) -> list[int | float | bool | str]:
        """Its items. WeightsError for texts that are no UTF-8."""
        if self.kind != TEXT:
            return list(struct.unpack_from(f"<{self.count}{NUMBERS[self.kind]}", self._header, self._start))
        texts: list[int | float | bool | str] = []
        at, header, unpack = self._start, self._header, struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            start = at + 8
            at = start + int(unpack(header, at)[0])
            texts.append(_text(self.file, header[start:at], self.key))
        return texts


Value = int | float | bool | str | GgufArray


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself, by key, and its tensors by name."""

    file: str
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_gguf_header(file: str, size: int, read: Read) -> GgufHeader:
    """The header of one file of `size` bytes. WeightsError, naming the file, for all that is not as the format says."""
    data = _HeaderBytes(file, size, read)
    if data.take(len(MAGIC)) != MAGIC:
        if is_lfs_pointer(bytes(data.data[:8])):
            raise WeightsError(f"{data.file} {LFS_POINTER}", LFS_HINT)
        data.refuse("it does not begin with GGUF", "give a file that is of the GGUF format")
    version = data.number("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        data.refuse(
            "its numbers are big-endian, and little-endian files are read"
            if swapped
            else f"it is of version {version} and versions 2 and 3 are read",
            "convert the model again with today's llama.cpp",
        )
    tensor_count, pair_count = data.number("Q"), data.number("Q")
    # The least that a pair and a tensor take: a name's length, a type and a value; that and dims and an offset.
    data.check_room(pair_count, 13, "key-value pairs")
    metadata: dict[str, Value] = {}
    for _ in range(pair_count):
        key = data.text("a key", NAME_LIMIT)
        if key in metadata:
            data.refuse(f"its metadata gives {key!r} twice")
        metadata[key] = _value(data, key)
    data.check_room(tensor_count, 24, "tensors")
    found = [_tensor(data) for _ in range(tensor_count)]
    return GgufHeader(file, metadata, _placed(data, found, _alignment(data, metadata)))


class _HeaderBytes:
    """The first bytes of a file, read as far as they are asked for."""

    def __init__(self, file: str, size: int, read: Read) -> None:
        self.file, self.size = file, size
        self.at = 0
        self.data = bytearray()
        self._read = read

    def refuse(
        self, why: str, hint: str = "the file is torn or was not written by llama.cpp; copy it again"
    ) -> NoReturn:
        raise WeightsError(f"{self.file}: {why}", hint)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.skip(count)
        return bytes(self.data[self.at - count : self.at])

    def skip(self, count: int) -> None:
        """Go past so many bytes, which are read."""
        end = self.at + count
        if end > len(self.data):
            self._grow(end)
        self.at = end

    def number(self, code: str) -> int:
        width = struct.calcsize(f"<{code}")
        self.skip(width)
        return int(struct.unpack_from(f"<{code}", self.data, self.at - width)[0])

    def text(self, what: str, limit: int) -> str:
        length = self.number("Q")
        if length > limit:
            self.refuse(f"{what} is said to have {length} bytes and {limit} is the most")
        return _text(self.file, self.take(length), what)

    def check_room(self, count: int, least: int, what: str) -> None:
        """So many things of so many bytes at least fit into the rest of the file."""
        if count > (self.size - self.at) // least:
            self.refuse(f"it says that it has {count} {what}, and {self.size - self.at} bytes are left in it")

    def skip_texts(self, count: int) -> None:
        """Go past so many texts, each with its length."""
        at, unpack, known = self.at, struct.Struct("<Q").unpack_from, len(self.data)
        for _ in range(count):
            start = at + 8
            if start > known:
                self._grow(start)
                known = len(self.data)
            at = start + unpack(self.data, at)[0]
            if at > known:
                self._grow(at)
                known = len(self.data)
        self.at = at

    def _grow(self, end: int) -> None:
        if end > self.size:
            self.refuse(f"its header goes on to byte {end} at least and the file has {self.size}")
        if end > HEADER_LIMIT:
            self.refuse(f"its header goes on to byte {end} at least and {HEADER_LIMIT} is the most that is read")
        while len(self.data) < end:
            start = len(self.data)
            self.data += self._read(start, min(self.size, start + STEP))


def _text(file: str, data: bytes | bytearray, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WeightsError(f"{file}: {what} is no UTF-8 ({error.reason})", "the file is torn; copy it again") from error


def _value(data: _HeaderBytes, key: str) -> Value:
    kind = data.number("I")
    if kind == TEXT:
        return data.text(key, HEADER_LIMIT)
    if kind == ARRAY:
        return _array(data, key)
    if kind not in NUMBERS:
        data.refuse(f"{key!r} is of type {kind}, which the format does not have")
    code = NUMBERS[kind]
    raw = data.take(struct.calcsize(f"<{code}"))
    if code == "?" and raw not in (b"\0", b"\1"):
        data.refuse(f"{key!r} is neither true nor false: its byte is {raw[0]}")
    number: int | float | bool = struct.unpack(f"<{code}", raw)[0]
    return number


def _array(data: _HeaderBytes, key: str) -> GgufArray:
    kind, count = data.number("I"), data.number("Q")
    start = data.at
    if kind == TEXT:
        data.check_room(count, 8, f"texts in {key}")
        data.skip_texts(count)
    elif kind in NUMBERS:
        width = struct.calcsize(f"<{NUMBERS[kind]}")
        data.check_room(count, width, f"numbers in {key}")
        data.skip(count * width)
    else:
        data.refuse(f"{key!r} is a list of type {kind}; lists of numbers and of texts are read")
    return GgufArray(data.file, key, kind, count, data.data, start)


def _tensor(data: _HeaderBytes) -> GgufTensor:
    """A tensor as the header has it: its `start` is counted from where the tensors' bytes begin."""
    name = data.text("a tensor's name", NAME_LIMIT)
    dims = data.number("I")
    if not 1 <= dims <= DIMS_LIMIT:
        data.refuse(f"tensor {name!r} has {dims} dims, and it may have 1 to {DIMS_LIMIT}")
    shape = tuple(data.number("Q") for _ in range(dims))[::-1]
    number, offset = data.number("I"), data.number("Q")
    if number not in BLOCK_TYPES:
        data.refuse(f"tensor {name!r} is of type {number}, which is not known here")
    kind = BLOCK_TYPES[number]
    if min(shape) < 1 or math.prod(shape) >= INT64_LIMIT:
        data.refuse(f"tensor {name!r} has shape {shape}, which no tensor can have")
    if shape[-1] % kind.elements:
        data.refuse(
            f"tensor {name!r} has rows of {shape[-1]}, no whole number of blocks of {kind.name} ({kind.elements})"
        )
    return GgufTensor(name, data.file, kind, shape, offset, offset + math.prod(shape) // kind.elements * kind.nbytes)


def _alignment(data: _HeaderBytes, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    is_power = isinstance(alignment, int) and 0 < alignment <= ALIGNMENT_LIMIT and not alignment & (alignment - 1)
    if not is_power or isinstance(alignment, bool) or not isinstance(alignment, int):
        data.refuse(f"general.alignment is {alignment!r} and should be a power of two up to {ALIGNMENT_LIMIT}")
    return alignment


def _placed(data: _HeaderBytes, found: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
    """The tensors with their places in the file: each begins where the one before it ends, padded, as all writers do.

    An overlap or a hole is how a wrong offset shows.
    """
    base = _padded(data.at, alignment)
    tensors: dict[str, GgufTensor] = {}
    at = 0
    for tensor in found:
        name = tensor.name
        if name in tensors:
            data.refuse(f"it has two tensors {name!r}")
        if tensor.start != at:
            data.refuse(f"tensor {name!r} is said to begin at {tensor.start} and the one before it makes that {at}")
        if base + tensor.stop > data.size:
            data.refuse(f"tensor {name!r} ends at byte {base + tensor.stop} and the file has {data.size}")
        tensors[name] = GgufTensor(
            name, tensor.file, tensor.type, tensor.shape, base + tensor.start, base + tensor.stop
        )
        at = _padded(tensor.stop, alignment)
    return tensors


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
