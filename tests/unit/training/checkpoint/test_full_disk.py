"""A disk that is full, or a file that may not grow: the save is reported as failed and the run goes on."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.training.saves import on_ranks
from tllm.comm.collectives.group import Group
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
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
