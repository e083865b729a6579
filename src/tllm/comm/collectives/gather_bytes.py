"""Bytes from every rank to every rank, for what ranks must agree on before they act."""

from __future__ import annotations

import msgspec

from tllm.comm.collectives.group import Group
from tllm.core.errors import UNREADABLE, FrameError

LIMIT = 256 * 1024 * 1024


def exchange(group: Group, payload: bytes, limit: int = LIMIT) -> list[bytes]:
    """What each rank passes, by rank, on every rank. At most `limit` bytes all together."""
    if group.rank == 0:
        gathered = [payload, *(group.recv[peer].recv_bytes(limit) for peer in range(1, group.size))]
        return gathered if group.size == 1 else _unpack(group.broadcast_bytes(_pack(gathered), 0, limit))
    group.send[0].send_bytes(payload)
    return _unpack(group.broadcast_bytes(None, 0, limit))


def _pack(gathered: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(gathered)


def _unpack(content: bytes) -> list[bytes]:
    try:
        return msgspec.msgpack.decode(content, type=list[bytes])
    except UNREADABLE as error:
        raise FrameError(f"what rank 0 passed on is no list of bytes: {error}") from error
