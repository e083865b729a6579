"""Whether the disks of a run have room for its saves, as its ranks find it when the run begins."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.shard_assignment import ShardAssignment
from tllm.training.state.tensor_blocks import is_of_model
from tllm.weights.boxes import widths


class RankRoom(msgspec.Struct, frozen=True):
    """What one rank writes of each save, in bytes, of which `model` are the finished model's too; and where.

    `disk` tells a machine's disks apart: its ranks mostly write to one. `source` names one of the network, which
    several machines may share. `free` is None where the system does not say.
    """

    folder: str
    host: str
    disk: int
    free: int | None
    saved: int
    model: int
    source: str = ""

    @property
    def which(self) -> tuple[str, int]:
        """Alike for ranks that write to one disk."""
        return (self.source, 0) if self.source else (self.host, self.disk)


RANK_ROOM = msgspec.msgpack.Decoder(RankRoom)


class SavesToCome(NamedTuple):
    """How many more saves are on the disks at once: while one is written, and beside the finished model at the end."""

    at_once: int
    at_end: int


def to_come(complete: int, left: int, limit: int) -> SavesToCome:
    """Of a run that has `complete` saves and makes `left` more, of which it keeps `limit`, and one that is written."""
    return SavesToCome(min(left, max(1, limit + 1 - complete)), min(left, limit - complete))


def room_of(root: Path, disk: DurableDisk, assignment: ShardAssignment) -> RankRoom:
    """What this rank has to say."""
    saved = model = 0
    for share in assignment.shares:
        held = assignment.held[share.block]
        nbytes = math.prod(widths(share.box)) * held.itemsize
        saved += nbytes
        model += nbytes if is_of_model(held.name) else 0
    number, source = root.stat().st_dev, disk.network_source(root)
    return RankRoom(str(root), socket.gethostname(), number, disk.free(root), saved, model, source)


def missing_room(rooms: Sequence[RankRoom], more: SavesToCome) -> str:
    """What to tell of disks on which the saves that come, or the finished model that rank 0 writes, find no room; ""
    where all have some. Files beside the tensors are small and are not counted."""
    disks: dict[tuple[str, int], list[int]] = {}
    for rank, room in enumerate(rooms):
        disks.setdefault(room.which, []).append(rank)
    final = sum(room.model for room in rooms)
    told = (_of_disk(rooms, ranks, more, final if 0 in ranks else 0) for ranks in disks.values())
    return "; ".join(one for one in told if one)


def _of_disk(rooms: Sequence[RankRoom], ranks: list[int], more: SavesToCome, final: int) -> str:
    first = rooms[ranks[0]]
    saved = sum(rooms[rank].saved for rank in ranks)
    needed = max(more.at_once * saved, more.at_end * saved + final)
    if first.free is None or needed <= first.free:
        return ""
    hosts = len({rooms[rank].host for rank in ranks})
    where = f"on {first.host}" if hosts == 1 else f"({first.source}), which {hosts} machines share,"
    which = f"{first.folder} {where} has {amount(first.free)} free"
    if more.at_once and first.free < saved:
        return f"{which} and a save takes {amount(saved)} there: saves will fail until there is more room"
    saves = counted(more.at_once, "save")
    beside = ", or fewer with the finished model" if final else ""
    return (
        f"{which}, a save takes {amount(saved)} there, and the run {amount(needed)} more at most "
        f"({saves} at once{beside}): make room, or some will fail"
    )
