"""Tensors whose shape the receiver does not know: a small header first, held against a limit before memory is taken."""

from __future__ import annotations

import math

import msgspec
import torch

from tllm.comm.links import errors as faults
from tllm.comm.links.frame import CODES, DTYPES, MAX_DIMS, MAX_WIDTH, dtype_name, tensor_prefix
from tllm.comm.links.link import Link
from tllm.core.errors import UNREADABLE

HEADER_BYTES = 128


class Typed(msgspec.Struct, array_like=True, frozen=True):
    """What is to come: the dtype by its code in `frame.DTYPES`, and the shape."""

    code: int
    shape: tuple[int, ...]


def send_typed(link: Link, x: torch.Tensor) -> None:
    """Send a tensor and, ahead of it, what it is."""
    tensor_prefix(tuple(x.shape), x.dtype, 0)  # refuse here what no link carries
    link.send_bytes(msgspec.msgpack.encode(Typed(CODES[x.dtype], tuple(x.shape))))
    link.send(x)


def recv_typed(link: Link, limit: int) -> torch.Tensor:
    """Receive a tensor of at most `limit` bytes. FrameError, and the link is over, where more is to come."""
    header = link.recv_bytes(HEADER_BYTES)
    try:
        said = msgspec.msgpack.decode(header, type=Typed)
    except UNREADABLE as error:
        link.close()
        raise faults.refused_link(link.source, link.target, f"{header[:16]!r}", "a header of a tensor") from error
    known = 0 <= said.code < len(DTYPES) and len(said.shape) <= MAX_DIMS
    if not known or not all(0 <= width <= MAX_WIDTH for width in said.shape):
        link.close()
        raise faults.refused_link(link.source, link.target, f"{said}", "a header of a tensor")
    dtype = DTYPES[said.code]
    if math.prod(said.shape) * dtype.itemsize > limit:
        link.close()
        got = f"{dtype_name(dtype)} {said.shape} of {math.prod(said.shape) * dtype.itemsize} bytes"
        raise faults.refused_link(link.source, link.target, got, f"up to {limit} bytes")
    return link.recv(said.shape, dtype)
