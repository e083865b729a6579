"""GGUF files of which only the beginning is on this disk: enough for a model's config and its tokenizer.

Beside each lies `NAME.gguf.rest`, which says how long the whole file is and has the few tensors that a config is made
of. Whoever reads weights there meets a file that ends too early, which is an error, and never zeros. No torch.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from tllm.core.disk import write_whole
from tllm.core.errors import UNREADABLE, WeightsError
from tllm.core.gguf_header import Read, read_gguf_header

HOME = "XDG_CACHE_HOME"
REST = ".rest"
SCALES = "rope_"
"""How the names of the tensors begin that say how positions are scaled: vectors of float32."""
FLOATS_LIMIT = 65536
"""Bytes of such a tensor."""


class GgufRest(msgspec.Struct, frozen=True):
    """`size`: bytes of the whole file; `floats`: of those tensors that configs are made of."""

    size: int
    floats: dict[str, tuple[float, ...]]


_RESTS = msgspec.json.Decoder(GgufRest)


def keep_head(path: Path, size: int, read: Read) -> None:
    """Put the beginning of a GGUF file of `size` bytes at `path`, as far as its header is read, and what is known of
    its rest beside it. Does nothing where they are there."""
    if path.exists() and rest_of(path) is not None:
        return
    head = bytearray()

    def reads(start: int, stop: int) -> bytes:
        assert start == len(head), "a header is read from the front"
        head.extend(data := read(start, stop))
        return data

    header = read_gguf_header(path.name, size, reads)
    scales = [tensor for tensor in header.tensors.values() if tensor.name.startswith(SCALES)]
    for tensor in scales:
        check_floats(tensor.file, tensor.name, tensor.type.name, tensor.stop - tensor.start)
    floats = {tensor.name: as_floats(read(tensor.start, tensor.stop)) for tensor in scales}
    write_whole(_rest_path(path), msgspec.json.encode(GgufRest(size, floats)), HOME)
    write_whole(path, bytes(head), HOME)


def rest_of(path: Path) -> GgufRest | None:
    """What is known of a file of which `path` has only the beginning; None of one that is whole."""
    try:
        return _RESTS.decode(_rest_path(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise WeightsError(f"cannot read {_rest_path(path)}: {error}", "remove it; it is fetched again") from error


def as_floats(data: bytes) -> tuple[float, ...]:
    """Numbers of float32, little-endian."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def check_floats(file: str, name: str, kind: str, nbytes: int) -> None:
    """WeightsError for a tensor that is no short vector of float32."""
    if kind != "F32" or nbytes > FLOATS_LIMIT:
        raise WeightsError(f"{file}: {name} is {kind} of {nbytes} bytes; up to {FLOATS_LIMIT} of F32 are read")


def _rest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}{REST}")
