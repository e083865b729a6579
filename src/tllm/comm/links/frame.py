"""The frame format: how a tensor or a byte string is written on a link, and how its header is checked.

A header is checked before memory for the payload is taken. Its layout, with sizes in bytes:

    magic 4 | version 1 | kind 1 | dtype 1 | ndim 1 | epoch 4 | length 8 | shape 8 x 4      the prefix, 52 bytes
    sequence 8 | crc32 4                                                                    64 in all, little-endian
    payload

The prefix depends only on shape, dtype and epoch, so that a link remembers it. `length` is that of the whole payload in
bytes; dims that are not used are 0. `sequence` counts the frames of a link from 0. The checksum is the CRC-32 of the
payload and then the first 60 bytes of the header. On a TLS connection it is that of the header alone: each record of
TLS carries a tag over all its bytes, and a second checksum of them costs about as much as encrypting them does
(docs/log/communication.md).

A tensor of more than PIECE_BYTES travels as several frames. Each has the prefix of the whole tensor, the next sequence
number, so many bytes of payload (the last one the rest) and its own checksum: the checksum of one piece is computed
while another is on the wire.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from typing import NamedTuple

import torch

from tllm.core.errors import FrameError

MAGIC = b"tllm"
VERSION = 3
TENSOR, BYTES = 1, 2
MAX_DIMS = 8
MAX_WIDTH = 2**32 - 1
HEADER_SIZE = 64
PREFIX_SIZE = 52
CRC_AT = 60
PIECE_BYTES = 512 * 1024

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

_PREFIX = struct.Struct("<4sBBBBIQ8I")
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")
assert _PREFIX.size == PREFIX_SIZE and PREFIX_SIZE + _SEQUENCE.size == CRC_AT and CRC_AT + _CRC.size == HEADER_SIZE

pack_sequence = _SEQUENCE.pack
crc32 = zlib.crc32

Memory = ctypes.Array[ctypes.c_char] | memoryview
Buffer = bytes | bytearray | memoryview


class TensorFrames(NamedTuple):
    """What the frames of every tensor of one shape and dtype have in common in one epoch.

    `places` are the slices of the tensor's bytes that are the frames' payloads; an empty tensor has one empty slice.
    `memory.from_address(tensor.data_ptr())` is what `memory_of` gives.
    """

    prefix: bytes
    places: tuple[slice, ...]
    memory: type[ctypes.Array[ctypes.c_char]]


class Header(NamedTuple):
    """The fields of a valid header; `dtype` is None for a frame of bytes."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    epoch: int
    sequence: int
    length: int
    crc: int

    def __str__(self) -> str:
        what = f"{self.length} bytes" if self.dtype is None else f"{dtype_name(self.dtype)} {self.shape}"
        return f"{what}, epoch {self.epoch}, frame {self.sequence}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_prefix(shape: tuple[int, ...], dtype: torch.dtype, epoch: int) -> bytes:
    """The part of a header that is the same for every tensor of this shape and dtype in this epoch."""
    if dtype not in CODES:
        known = ", ".join(map(dtype_name, DTYPES))
        raise FrameError(f"tensors of {dtype_name(dtype)} do not travel on links", f"these do: {known}")
    if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_WIDTH:
        raise FrameError(f"a tensor of shape {shape} does not fit a frame", f"at most {MAX_DIMS} dims of {MAX_WIDTH}")
    length = math.prod(shape) * dtype.itemsize
    dims = (*shape, *(0,) * (MAX_DIMS - len(shape)))
    return _PREFIX.pack(MAGIC, VERSION, TENSOR, CODES[dtype], len(shape), epoch, length, *dims)


def tensor_frames(shape: tuple[int, ...], dtype: torch.dtype, epoch: int) -> TensorFrames:
    """The frames of tensors of this shape and dtype; FrameError where they cannot travel."""
    length = math.prod(shape) * dtype.itemsize
    starts = range(0, max(length, 1), PIECE_BYTES)
    places = tuple(slice(start, min(start + PIECE_BYTES, length)) for start in starts)
    return TensorFrames(tensor_prefix(shape, dtype, epoch), places, ctypes.c_char * length)


def bytes_prefix(length: int, epoch: int) -> bytes:
    return _PREFIX.pack(MAGIC, VERSION, BYTES, 0, 0, epoch, length, *(0,) * MAX_DIMS)


def seal_header(head: bytes, payload: Memory | bytes) -> bytes:
    """The header of `payload`, 64 bytes; `head` is its prefix and sequence, 60 bytes."""
    return head + _CRC.pack(crc32(head, crc32(payload)))


def seal(head: bytes, payload: Memory | bytes) -> bytes:
    """A whole frame, header and payload, in new memory."""
    return b"".join((seal_header(head, payload), payload))


def is_sealed(header: Buffer, payload: Memory | Buffer) -> bool:
    """Whether the checksum in `header`, which may go on behind its end, is that of header and payload as they came."""
    return bool(_CRC.unpack_from(header, CRC_AT)[0] == crc32(header[:CRC_AT], crc32(payload)))


def parse(header: Buffer) -> Header:
    """Parse the 64 bytes of a header; FrameError when they are no header, or contradict themselves."""
    assert len(header) == HEADER_SIZE
    magic, version, kind, code, ndim, epoch, length, *dims = _PREFIX.unpack_from(header)
    if magic != MAGIC:
        raise FrameError(f"{bytes(header[:8])!r} is not the start of a frame", "something else talks on this link")
    if version != VERSION:
        raise FrameError(f"frame version {version}, and this node speaks {VERSION}", "run the same tllm on every node")
    if kind not in (TENSOR, BYTES) or code >= len(DTYPES) or ndim > MAX_DIMS:
        raise FrameError(f"frame of kind {kind}, dtype {code}, {ndim} dims: there is no such frame")
    if any(dims[ndim:]) or (kind == BYTES and (code or ndim)):
        raise FrameError(f"frame of {ndim} dims fills in {tuple(dims)}")
    shape = tuple(dims[:ndim])
    if kind == TENSOR and length != math.prod(shape) * DTYPES[code].itemsize:
        raise FrameError(f"frame declares {length} bytes for {dtype_name(DTYPES[code])} {shape}")
    sequence = _SEQUENCE.unpack_from(header, PREFIX_SIZE)[0]
    crc = _CRC.unpack_from(header, CRC_AT)[0]
    return Header(None if kind == BYTES else DTYPES[code], shape, epoch, sequence, length, crc)


def describe(header: bytes | bytearray) -> str:
    """A header in words, for errors, whatever its bytes are; sequence and checksum may be missing."""
    try:
        return str(parse(header.ljust(HEADER_SIZE, b"\0")))
    except FrameError as error:
        return error.message


def memory_of(tensor: torch.Tensor) -> Memory:
    """A view of the bytes of a tensor that `is_plain`. It does not keep the tensor alive: the caller must."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a link can read and write the tensor where it lies: contiguous, and in this process's own memory."""
    return tensor.is_cpu and tensor.is_contiguous()
