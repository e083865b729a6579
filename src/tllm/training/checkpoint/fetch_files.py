"""Brings files of a save that a node lacks from the nodes that have them, so that no shared disk is needed."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from tllm.comm.collectives.group import Group
from tllm.core.disk import whole_file
from tllm.core.errors import WeightsError, decoded
from tllm.training.checkpoint import save_folders as folders
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.manifest import LIMIT, NAME

CHUNK_BYTES = 8 * 1024 * 1024


class LocalSave(msgspec.Struct, frozen=True):
    """What one rank has of a save and wants of it. `place` tells folders apart: ranks of a node share one."""

    place: str
    files: dict[str, int]
    wants: tuple[str, ...]


_SAVES = msgspec.msgpack.Decoder(LocalSave)


class FileTransfer(NamedTuple):
    """One file from the rank that reads it to the rank that writes it."""

    file: str
    size: int
    source: int
    target: int


def bring_list(disk: DurableDisk, root: Path, step: int, group: Group) -> None:
    """Let every rank have the list of a save; those without the save's folder make it. All ranks call."""
    path = folders.folder_of(root, step) / NAME
    mine = path.read_bytes() if path.is_file() else b""
    found = group.all_gather_bytes(bytes([bool(mine)]))
    source = next((rank for rank, has in enumerate(found) if any(has)), None)
    if source is None:
        raise WeightsError(f"no node has the list of the save of step {step}", "start the nodes that took part in it")
    text = group.broadcast_bytes(mine if group.rank == source else None, source, LIMIT)
    for rank in range(group.size):  # in turn, as ranks may share the folder
        if rank == group.rank and not path.is_file():
            with _written(path):
                disk.make_folder(path.parent)
                disk.write(path, [text])
        group.barrier()


def bring_files(root: Path, step: int, wanted: Collection[str], group: Group) -> int:
    """Copy what is `wanted` and not whole here from others; the bytes that came. All ranks call."""
    folder = folders.folder_of(root, step)
    _, sizes = folders.list_of(folder / NAME)
    found = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    files = {name: size for name, size in found.items() if sizes.get(name) == size}
    mine = LocalSave(_place(folder), files, tuple(sorted(set(wanted) - set(files))))
    everyone = [decoded(one, _SAVES) for one in group.all_gather_bytes(msgspec.msgpack.encode(mine))]
    brought = 0
    for way in _ways(everyone, step):
        if way.source == group.rank:
            _send(folder / way.file, way.size, group, way.target)
        elif way.target == group.rank:
            _receive(folder / way.file, way.size, group, way.source)
            brought += way.size
    group.barrier()
    return brought


def _ways(everyone: list[LocalSave], step: int) -> Iterator[FileTransfer]:
    """Each file once for each folder that lacks it, in an order that all ranks find alike."""
    coming: set[tuple[str, str]] = set()
    for target, here in enumerate(everyone):
        for file in here.wants:
            source = next((rank for rank, other in enumerate(everyone) if file in other.files), None)
            if source is None:
                raise WeightsError(
                    f"no node that answers has {file} of the save of step {step}",
                    "start the nodes that took part in this save",
                )
            if (here.place, file) not in coming:
                coming.add((here.place, file))
                yield FileTransfer(file, everyone[source].files[file], source, target)


def _send(path: Path, size: int, group: Group, target: int) -> None:
    with path.open("rb") as file:
        for start in range(0, size, CHUNK_BYTES):
            group.send[target].send_bytes(file.read(min(CHUNK_BYTES, size - start)))


def _receive(path: Path, size: int, group: Group, source: int) -> None:
    """Beside its place first: a half-brought file is not taken for a whole one. Its hashes are checked when read."""
    with _written(path), whole_file(path) as file:
        for _ in range(0, size, CHUNK_BYTES):
            file.write(group.recv[source].recv_bytes(CHUNK_BYTES))


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error.strerror or error}", "see that the disk has room") from error


def _place(folder: Path) -> str:
    found = os.stat(folder)
    return f"{socket.gethostname()} {found.st_dev} {found.st_ino}"
