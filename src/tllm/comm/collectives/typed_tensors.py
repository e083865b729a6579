"""Sends of tensors whose shape and dtype the receiver does not know.

A small message goes first and says what follows. The receiver checks it against a limit of bytes before it takes
memory.
"""

from __future__ import annotations

import math

import msgspec
import torch

from tllm.comm.links import errors as faults
from tllm.comm.links.frame import CODES, DTYPES, MAX_DIMS, MAX_WIDTH, dtype_name, tensor_prefix
from tllm.comm.links.link import Link
from tllm.core.errors import UNREADABLE

HEADER_BYTES = 128


class TensorHeader(msgspec.Struct, array_like=True, frozen=True):
    """What follows: the dtype, as its index in `frame.DTYPES`, and the shape."""

    code: int
    shape: tuple[int, ...]


def send_typed(link: Link, x: torch.Tensor) -> None:
    """Send a tensor's header, then the tensor; FrameError for one that no link can carry."""
    tensor_prefix(tuple(x.shape), x.dtype, 0)  # refuse here what no link carries
    link.send_bytes(msgspec.msgpack.encode(TensorHeader(CODES[x.dtype], tuple(x.shape))))
    link.send(x)


def recv_typed(link: Link, limit: int) -> torch.Tensor:
    """Receive a tensor of at most `limit` bytes; for anything else FrameError, and the link is closed."""
    message = link.recv_bytes(HEADER_BYTES)
    try:
        declared = msgspec.msgpack.decode(message, type=TensorHeader)
    except UNREADABLE as error:
        link.close()
        raise faults.refused_link(link.source, link.target, f"{message[:16]!r}", "a header of a tensor") from error
    known = 0 <= declared.code < len(DTYPES) and len(declared.shape) <= MAX_DIMS
    if not known or not all(0 <= width <= MAX_WIDTH for width in declared.shape):
        link.close()
        shown = f"Typed(code={declared.code}, shape={declared.shape})"
        raise faults.refused_link(link.source, link.target, shown, "a header of a tensor")
    dtype = DTYPES[declared.code]
    if math.prod(declared.shape) * dtype.itemsize > limit:
        link.close()
        got = f"{dtype_name(dtype)} {declared.shape} of {math.prod(declared.shape) * dtype.itemsize} bytes"
        raise faults.refused_link(link.source, link.target, got, f"up to {limit} bytes")
    return link.recv(declared.shape, dtype)
