"""A disk that is full, or a file that may not grow: the save is reported as failed and the run goes on."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.training.saves import on_ranks
from tllm.comm.collectives.group import Group
from tllm.core.memory import amount
from tllm.training.checkpoint import durable_disk
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.checkpoint.disk_room import RankRoom, missing_room, to_come
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.state.tensor_blocks import TensorBlock

from .test_kills import blocks_at, check, saved_until

MEGABYTE = 1 << 20


def large_blocks(step: int) -> list[TensorBlock]:
    return [TensorBlock("w", ((0, MEGABYTE),), torch.full((MEGABYTE,), float(step)))]


class Full(DurableDisk):
    """Has no room left at its n-th point, once."""

    def __init__(self, full_at: int, code: int) -> None:
        self._left = full_at
        self._code = code

    def point(self, what: str) -> None:
        self._left -= 1
        if self._left == -1:
            raise OSError(self._code, os.strerror(self._code), what)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=lambda code: errno.errorcode[code])
def test_an_error_at_every_point(tmp_path: Path, code: int) -> None:
    ended = 0
    for full_at in range(100):
        root = tmp_path / str(full_at)
        saved_until(root, 3)
        checkpoints = AsyncSaves(root, disk=Full(full_at, code))
        checkpoints.save(4, blocks_at(4), {"step": 4})
        (result,) = checkpoints.wait()
        if not result.error:
            ended += 1
            if checkpoints.complete == [3, 4] and sorted(p.name for p in root.iterdir()) == ["step-3", "step-4"]:
                break
        else:
            assert "rank 0 cannot write" in result.error and os.strerror(code) in result.error
            assert not (root / "step-4.tmp").exists(), "its room is given back"
        checkpoints.save(5, blocks_at(5), {"step": 5})
        assert checkpoints.wait()[0].error == "", "the run goes on, and there is room again"
        assert len(checkpoints.complete) == 2 and checkpoints.latest == 5
        for step in AsyncSaves(root).complete[-2:]:
            check(root, step)
    assert ended == 1, "every point was reached"


def test_one_rank_of_several_has_no_room(tmp_path: Path) -> None:
    def work(group: Group) -> list[tuple[int, str]]:
        disk = Full(3, errno.ENOSPC) if group.rank == 1 else None
        checkpoints = AsyncSaves(tmp_path / f"node{group.rank}", group, disk=disk)
        said = []
        for step in (1, 2):
            checkpoints.save(step, blocks_at(step, group.rank, 3), {"step": step})
            said += [(result.step, result.error) for result in checkpoints.wait()]
        assert checkpoints.complete == [2]
        return said

    ranks = on_ranks(3, work)
    assert ranks[0] == ranks[1] == ranks[2], "all ranks know how it ended"
    (_, first), (_, second) = ranks[0]
    assert "rank 1 cannot write" in first and "No space left" in first
    assert second == ""
    assert all([path.name for path in (tmp_path / f"node{i}").iterdir()] == ["step-2"] for i in range(3))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 14 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    checkpoints = AsyncSaves(small_disk)
    errors = []
    for step in range(1, 6):
        if step == 4:
            (small_disk / "other.bin").write_bytes(bytes(4 * MEGABYTE))
        if step == 5:
            (small_disk / "other.bin").unlink()
        checkpoints.save(step, large_blocks(step), {"step": step})
        errors.append(checkpoints.wait()[0].error)
    assert [bool(error) for error in errors] == [False, False, False, True, False]
    assert "No space left on device" in errors[3]
    assert checkpoints.complete == [3, 5]
    for step in (3, 5):
        assert torch.equal(open_folder(small_disk / f"step-{step}").whole("w"), large_blocks(step)[0].tensor)


class Sized(DurableDisk):
    """A disk with so many bytes free, whatever is written; None: a file system that does not say."""

    def __init__(self, free: int | None) -> None:
        self._free = free

    def free(self, folder: Path) -> int | None:
        return self._free


SAVED = 4 * MEGABYTE
"""Bytes of `large_blocks`, all of them the model's."""


@pytest.mark.parametrize(
    ("free", "left", "said"),
    [
        (None, 9, ""),
        (3 * SAVED, 9, ""),
        (
            3 * SAVED - 1,
            9,
            "a save takes 4.0 MiB there, and the run 12.0 MiB more at most (3 saves at once, or fewer with the",
        ),
        (2 * SAVED, 1, ""),  # the only save, and the model
        (2 * SAVED - 1, 1, "the run 8.0 MiB more at most (1 save at once, or fewer with the finished model)"),
        (SAVED - 1, 9, "has 4.0 MiB free and a save takes 4.0 MiB there: saves will fail"),
        (0, 0, "the run 4.0 MiB more at most (0 saves at once, or fewer"),
    ],
)
def test_whether_what_is_to_come_has_room_is_known_before(
    tmp_path: Path, free: int | None, left: int, said: str
) -> None:
    found = AsyncSaves(tmp_path, disk=Sized(free)).missing_room(large_blocks(0), left)
    assert said in found and bool(said) == bool(found)
    assert not found or found.startswith(f"{tmp_path} on {socket.gethostname()} has {amount(free or 0)} free")


def test_saves_that_are_there_leave_room_for_fewer(tmp_path: Path) -> None:
    checkpoints = AsyncSaves(tmp_path, disk=Sized(SAVED))
    for step in (1, 2):
        checkpoints.save(step, large_blocks(step), {"step": step})
    checkpoints.wait()
    assert checkpoints.missing_room(large_blocks(2), 9) == "", "one is removed when the next is whole"
    fewer = AsyncSaves(tmp_path, disk=Sized(SAVED - 1))
    assert "saves will fail" in fewer.missing_room(large_blocks(2), 9)


def test_ranks_of_one_disk_need_its_room_together(tmp_path: Path) -> None:
    def said(group: Group) -> str:
        half = MEGABYTE // 2
        box = ((group.rank * half, (group.rank + 1) * half),)
        checkpoints = AsyncSaves(tmp_path / f"node{group.rank}", group, disk=Sized(3 * SAVED - 1))
        return checkpoints.missing_room([TensorBlock("w", box, torch.zeros(half))], 9)

    first, second = on_ranks(2, said)
    assert first == second and first.startswith(f"{tmp_path}/node0 on ") and first.count("free") == 1
    assert "a save takes 4.0 MiB there, and the run 12.0 MiB more" in first


def test_each_disk_that_lacks_room_is_told() -> None:
    """The first has the finished model of all ranks beside its saves; the last has room for what it writes."""
    rooms = [
        RankRoom("run", "a", 1, free=25 * MEGABYTE, saved=8 * MEGABYTE, model=4 * MEGABYTE),
        RankRoom("run", "b", 1, free=7 * MEGABYTE, saved=8 * MEGABYTE, model=4 * MEGABYTE),
        RankRoom("run", "c", 1, free=24 * MEGABYTE, saved=8 * MEGABYTE, model=4 * MEGABYTE),
    ]
    first, second = missing_room(rooms, to_come(complete=0, left=9, limit=2)).split("; ")
    assert "on a has 25.0 MiB free, a save takes 8.0 MiB there, and the run 28.0 MiB more at most" in first
    assert "on b has 7.0 MiB free and a save takes 8.0 MiB there: saves will fail" in second


def test_a_disk_of_the_network_is_one_for_all_machines_that_share_it() -> None:
    def told(*sources: str) -> list[str]:
        rooms = [
            RankRoom("run", host, 40 + n, free=25 * MEGABYTE, saved=8 * MEGABYTE, model=4 * MEGABYTE, source=source)
            for n, (host, source) in enumerate(zip("ab", sources, strict=True))
        ]
        return missing_room(rooms, to_come(complete=0, left=9, limit=2)).split("; ")

    (shared,) = told("nas:/data", "nas:/data")
    assert shared.startswith("run (nas:/data), which 2 machines share, has 25.0 MiB free, a save takes 16.0 MiB there")
    assert "the run 48.0 MiB more at most" in shared
    assert told("nas:/data", "nas:/more") == told("", "") == [""], "room for each machine's 24 MiB"


def test_a_disk_of_the_network_is_known_by_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each mount, of which others are of other disks, or name none that another machine has."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(durable_disk, "MOUNTS", mounts)
    for number, source, found in (
        (device, "nas:/data", "nas:/data"),
        (device, "//nas/data", "//nas/data"),
        (device + 1, "nas:/data", ""),
        (device, "/dev/sda1", ""),
        (device, "overlay", ""),
    ):
        at = f"{os.major(number)}:{os.minor(number)}"
        mounts.write_text(
            f"36 35 98:0 /a /b rw - ext4 nas:/other rw\n37 35 {at} / /mnt rw shared:1 - nfs4 {source} rw\n"
        )
        assert DurableDisk().network_source(tmp_path) == found
    mounts.unlink()
    assert DurableDisk().network_source(tmp_path) == "", "another system than Linux"


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    checkpoints = saved_until(tmp_path, 2)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN, "as Python leaves it"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    more = AsyncSaves(tmp_path / "more")
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, hard))
    try:
        more.save(3, large_blocks(3), {"step": 3})
        (result,) = more.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in result.error
    assert list((tmp_path / "more").iterdir()) == []
    assert checkpoints.complete == [1, 2]
