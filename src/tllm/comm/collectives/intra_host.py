"""Connects the devices of a group's ranks that share a machine: `connect_devices`, which all ranks call.

The ranks tell each other over the group's links, which are authenticated, where they are and which device they have.
The first of each machine makes a folder that only its user may enter, in which the ranks of the machine meet: it has a
store of torch.distributed as a file, and the board of `arrivals.py`. It is removed when all have met. We open no port
for it, and NCCL opens its own on loopback. Each machine decides by itself: to the others its messages are the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tllm.comm.collectives.device_links import DeviceLinks
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.group_links import ReceiveBuffers
from tllm.comm.nccl.arrivals import ArrivalBoard
from tllm.comm.nccl.device_backend import DeviceBackend, Nccl
from tllm.comm.nccl.device_channel import DeviceChannel
from tllm.core.errors import LinkClosed, counted, decoded

STORE, BOARD = "store", "arrivals"
PRIVATE = 0o700

FIRST_NUMBERS = 1 << 16
"""Of the first message between two devices, which is read: a machine's IOMMU may break copies from device to device."""


def connect_devices(
    group: Group, host: str, device: torch.device, seconds: float, backend: DeviceBackend | None = None
) -> str:
    """Let tensors of `device` go between ranks of one machine without the host, and say in one line what is so.

    All ranks of the group call it; a group of one does nothing. On a machine nothing changes, and the line says why,
    unless two ranks or more are there and each has a device of its own that the backend, by default NCCL, connects.
    `host` names this rank's machine; `seconds` is what an exchange may take. LinkError where connecting fails.
    """
    if group.size == 1:
        return ""
    backend = backend or Nccl()
    told = group.all_gather_bytes(msgspec.msgpack.encode(_Seat(host, backend.identity(device))))
    seats = [decoded(content, _SEATS, f"{len(content)} bytes do not say where a rank is") for content in told]
    mates = [rank for rank, seat in enumerate(seats) if seat.host == host]
    reason = _unconnected([seats[mate].device for mate in mates])
    place = _meet(group, mates if not reason else [])
    if place.path is None:
        group.barrier()
        return f"{group.name}: no {backend.name}, as {reason or 'ranks of this machine do not see the same files'}"
    store = dist.FileStore(str(place.path / STORE), len(mates))  # type: ignore[attr-defined]
    group.device_links = _links(group, mates, device, place, store, seconds, backend)
    _check_first_messages(group, mates, device)
    group.barrier()
    if place.folder is not None:
        place.folder.cleanup()  # while nobody gives up a store: one whose file goes at that moment ends its process
    return f"{group.name}: {backend.name} between the devices of {len(mates)} ranks of a machine"


class _Seat(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank is, by a name that no two machines have in common, and which device it has there; "" for none."""

    host: str
    device: str


_SEATS = msgspec.msgpack.Decoder(_Seat)


class _Meeting(NamedTuple):
    """Where ranks of a machine meet, None for nowhere; `folder` at the rank that has made it."""

    path: Path | None
    folder: TemporaryDirectory[str] | None


def _unconnected(devices: Sequence[str]) -> str:
    """Why these devices, of all ranks of a machine, are not connected; "" if they are."""
    if len(devices) == 1:
        return "one rank is on this machine"
    if not all(devices):
        return f"{devices.count('')} of {len(devices)} ranks of this machine have no device for it"
    if len(set(devices)) < len(devices):
        return f"{counted(len(devices), 'rank')} of this machine have {counted(len(set(devices)), 'device')}"
    return ""


def _meet(group: Group, mates: Sequence[int]) -> _Meeting:
    """The folder of the ranks `mates` of this machine, if they are some and all see it. All ranks of the group call."""
    folder = None
    if mates and group.rank == mates[0]:
        with contextlib.suppress(OSError):  # a full disk: then there is no place, and all hear so
            folder = TemporaryDirectory(prefix="tllm-", ignore_cleanup_errors=True)
            (Path(folder.name) / BOARD).touch()
    paths = group.all_gather_bytes(os.fsencode(folder.name) if folder is not None else b"")
    path = Path(os.fsdecode(paths[mates[0]])) if mates else None
    seen = group.all_gather_bytes(bytes([path is not None and _is_ours(path)]))
    if path is not None and all(any(seen[mate]) for mate in mates):
        return _Meeting(path, folder)
    if folder is not None:
        folder.cleanup()
    return _Meeting(None, None)


def _is_ours(path: Path) -> bool:
    """Whether this is a folder of this user's that nobody else may enter, with a board in it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == PRIVATE
    return private and found.st_uid == os.getuid() and (path / BOARD).exists()


def _links(
    group: Group,
    mates: Sequence[int],
    device: torch.device,
    place: _Meeting,
    store: Store,
    seconds: float,
    backend: DeviceBackend,
) -> DeviceLinks:
    """By which the group sends from now on what is on the device."""
    assert place.path is not None
    own = mates.index(group.rank)
    numbers = {mate: number for number, mate in enumerate(mates) if number != own}
    board = ArrivalBoard(place.path / BOARD, own, len(mates))
    try:
        process_group = backend.process_group(store, own, len(mates), seconds)
    except RuntimeError as error:  # torch has no other kind for what fails here
        raise LinkClosed(f"{backend.name} cannot be used on {device} of rank {group.rank}: {error}") from error
    links = {number: group.recv[mate] for mate, number in numbers.items()}
    channel = DeviceChannel(process_group, board, links, seconds)
    return DeviceLinks(group.rank, group.send, group.recv, ReceiveBuffers(device), channel, numbers)


def _check_first_messages(group: Group, mates: Sequence[int], device: torch.device) -> None:
    """One message between each two of `mates`, by which the backend connects them, and which is read."""
    others = [mate for mate in mates if mate != group.rank]
    came = {mate: torch.zeros(FIRST_NUMBERS, dtype=torch.int64, device=device) for mate in others}
    mine = torch.arange(FIRST_NUMBERS, device=device) + group.rank
    group.exchange(dict.fromkeys(others, mine), came)
    for mate, numbers in came.items():
        if not torch.equal(numbers - mate, mine - group.rank):
            group.close_devices()
            raise LinkClosed(
                f"what rank {mate} sent to {device} of rank {group.rank} came there changed",
                "copies between the devices of this machine are broken: NCCL_P2P_DISABLE=1 does without them",
            )
