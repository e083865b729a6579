"""A save stopped at any moment, by a kill or by the power, leaves the last complete one, which the next start finds."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.unit.training.saves import on_ranks
from tllm.comm.collectives.group import Group
from tllm.core.errors import ConfigError, LinkError, WeightsError
from tllm.training.checkpoint import save_folders as folders
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.manifest import NAME
from tllm.training.state.tensor_blocks import TensorBlock


class Killed(BaseException):
    """The process is gone."""


class Stopping(DurableDisk):
    """Stops at its n-th point. After a power cut, what was not synced is lost as well."""

    def __init__(self, stop_at: int | None = None, power: bool = False) -> None:
        self.passed: list[str] = []
        self._stop_at = stop_at
        self._power = power
        self._unsynced: dict[Path, None] = {}
        self._renamed: list[tuple[Path, Path]] = []

    def point(self, what: str) -> None:
        if self._stop_at is not None and len(self.passed) >= self._stop_at:
            if self._power and len(self.passed) == self._stop_at:
                self._lose()
            self.passed.append(what)
            raise Killed(what)
        self.passed.append(what)

    def write(self, path, content):  # type: ignore[no-untyped-def]
        self._unsynced[path] = None
        return super().write(path, content)

    def sync(self, descriptor: int, path: Path) -> None:
        super().sync(descriptor, path)
        self._unsynced.pop(path, None)
        self._renamed = [pair for pair in self._renamed if pair[1].parent != path]

    def rename(self, old: Path, new: Path) -> None:
        self._renamed.append((old, new))
        super().rename(old, new)
        self._unsynced = {(new / path.name if path.parent == old else path): None for path in self._unsynced}

    def _lose(self) -> None:
        for path in self._unsynced:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for old, new in reversed(self._renamed):
            if new.exists() and not old.exists():
                new.rename(old)


def blocks_at(step: int, rank: int = 0, ranks: int = 1) -> list[TensorBlock]:
    """Two tensors cut between ranks, each element the step's own."""
    rows = torch.arange(8 * rank // ranks, 8 * (rank + 1) // ranks)
    weight = rows[:, None].repeat(1, 3).float() + 100 * step
    box = ((int(rows[0]), int(rows[-1]) + 1), (0, 3))
    return [TensorBlock("w", box, weight), TensorBlock("exp_avg/w", box, -weight)]


def check(root: Path, step: int) -> None:
    opened = open_folder(folders.folder_of(root, step))
    assert torch.equal(opened.whole("w"), blocks_at(step)[0].tensor)
    assert torch.equal(opened.whole("exp_avg/w"), -blocks_at(step)[0].tensor)
    assert opened.facts == {"step": step}


def saved_until(root: Path, last: int, disk: DurableDisk | None = None, first: int = 1) -> AsyncSaves:
    checkpoints = AsyncSaves(root, disk=disk)
    for step in range(first, last + 1):
        checkpoints.save(step, blocks_at(step), {"step": step})
        assert checkpoints.wait()[0].error == ""
    return checkpoints


def points_of_a_save(tmp_path: Path, again: bool = False) -> int:
    """How many points a fourth save passes, the removal of the second included."""
    root = tmp_path / "count"
    saved_until(root, 3)
    if again:
        (folders.folder_of(root, 3)).rename(folders.folder_of(root, 4))
    disk = Stopping()
    checkpoints = AsyncSaves(root, disk=disk)
    assert not disk.passed
    if again:
        checkpoints.complete = [2]
    checkpoints.save(4, blocks_at(4), {"step": 4})
    checkpoints.wait()
    assert {"before", "after", "inside"} == {what.split()[0] for what in disk.passed}
    assert {"make", "write", "sync", "rename", "remove"} == {what.split()[1] for what in disk.passed}
    return len(disk.passed)


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power"])
def test_a_kill_at_every_point(tmp_path: Path, power: bool) -> None:
    count = points_of_a_save(tmp_path)
    assert count > 30
    reached = []
    for stop_at in range(count):
        root = tmp_path / str(stop_at)
        saved_until(root, 3)
        disk = Stopping(stop_at, power)
        checkpoints = AsyncSaves(root, disk=disk)
        checkpoints.save(4, blocks_at(4), {"step": 4})
        with pytest.raises(Killed):
            checkpoints.wait()
        again = AsyncSaves(root)
        assert again.latest in (3, 4), disk.passed[-1]
        assert len(again.complete) >= 2
        for step in again.complete:
            check(root, step)
        left = {path.name for path in root.iterdir()}
        assert left == {f"step-{step}" for step in again.complete}, f"{disk.passed[-1]} left {left}"
        saved_until(root, 6, first=again.latest + 1)
        check(root, 6)
        check(root, 5)
        reached.append(again.latest)
    assert reached[0] == 3 and reached[-1] == 4
    assert reached == sorted(reached), "once it counts it goes on to count"


def test_a_kill_while_an_old_one_is_replaced(tmp_path: Path) -> None:
    """A folder of the same name that is not complete stands in the way of a save."""
    for stop_at in range(points_of_a_save(tmp_path, again=True)):
        root = tmp_path / str(stop_at)
        saved_until(root, 3)
        folders.folder_of(root, 3).rename(folders.folder_of(root, 4))
        checkpoints = AsyncSaves(root, disk=Stopping(stop_at))
        checkpoints.complete = [2]
        checkpoints.save(4, blocks_at(4), {"step": 4})
        with pytest.raises(Killed):
            checkpoints.wait()
        again = AsyncSaves(root)
        check(root, 2)
        if open_folder(folders.folder_of(root, again.latest or 0)).facts == {"step": 4}:
            check(root, 4)


def test_a_kill_of_one_of_several_nodes_at_every_point(tmp_path: Path) -> None:
    """No shared disk: what one node renamed before another was killed is finished there at the next start."""

    def start(root: Path, victim: int | None, stop_at: int | None) -> tuple[list[int], int]:
        points = [0]

        def work(group: Group) -> list[int]:
            disk = Stopping(stop_at if group.rank == victim else None)
            checkpoints = AsyncSaves(root / f"node{group.rank}", group, disk=disk)
            found = list(checkpoints.complete)
            if stop_at is None and found:
                return found
            for step in (1, 2):
                checkpoints.save(step, blocks_at(step, group.rank, 3), {"step": step})
                try:
                    results = checkpoints.wait()
                except (Killed, LinkError):
                    group.close()
                    return []
                assert results[0].error == ""
            points[0] = max(points[0], len(disk.passed))
            return checkpoints.complete

        return on_ranks(3, work)[0], points[0]

    _, count = start(tmp_path / "count", None, None)
    seen = set()
    for victim in (0, 1):
        for stop_at in range(0, count, 2):
            root = tmp_path / f"{victim}-{stop_at}"
            start(root, victim, stop_at)
            found, _ = start(root, None, None)
            seen.add(tuple(found))
            nodes = [root / f"node{i}" for i in range(3)]
            for step in found:
                together = root.with_name(f"{root.name}-together-{step}")
                for node in nodes:
                    shutil.copytree(folders.folder_of(node, step), together, dirs_exist_ok=True)
                assert torch.equal(open_folder(together).whole("w"), blocks_at(step)[0].tensor)
                for node in nodes:
                    assert {path.name for path in node.iterdir()} == {f"step-{step}" for step in found}
    assert {(1,), (1, 2)} <= seen


def test_a_torn_or_changed_save_is_noticed(tmp_path: Path) -> None:
    saved_until(tmp_path, 3)
    folder = folders.folder_of(tmp_path, 3)
    model = folder / "model-00000.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    with pytest.raises(WeightsError, match=r"model-00000.*bytes \[0, 192\) are not what checkpoint.json says"):
        open_folder(folder).whole("w")
    model.write_bytes(content[:-1])
    assert AsyncSaves(tmp_path).complete == [2], "a file that is too short is no complete save"
    text = bytearray((folders.folder_of(tmp_path, 2) / NAME).read_bytes())
    text[-5] ^= 1
    (folders.folder_of(tmp_path, 2) / NAME).write_bytes(text)
    with pytest.raises(WeightsError):
        open_folder(folders.folder_of(tmp_path, 2))
    with pytest.raises(WeightsError, match=r"save of step 3 is not whole on these nodes: they lack model-00000"):
        AsyncSaves(tmp_path)
    assert folder.is_dir(), "what cannot be used is not thrown away"


def test_a_node_that_is_lost_does_not_let_the_run_begin_anew(tmp_path: Path) -> None:
    """What the others have of its save is kept for the day that it comes back."""

    def start(nodes: Sequence[str]) -> list[list[int] | str]:
        def work(group: Group) -> list[int] | str:
            try:
                checkpoints = AsyncSaves(tmp_path / nodes[group.rank], group)
            except WeightsError as error:
                return error.message
            found = list(checkpoints.complete)
            checkpoints.save(5, blocks_at(5, group.rank, 2), {"step": 5})
            assert all(result.error == "" for result in checkpoints.wait())
            return found

        return on_ranks(2, work)

    assert start(["east", "west"]) == [[], []]
    lost = (
        "the save of step 5 is not whole on these nodes: they lack exp_avg-00001.safetensors, model-00001.safetensors"
    )
    assert start(["east", "north"]) == [lost, lost]
    assert start(["west", "east"]) == [[5], [5]]


def test_a_node_with_another_or_a_torn_copy_of_the_save_is_brought_the_whole_one(tmp_path: Path) -> None:
    """One that was away while the step was taken again, or died while it wrote it, or was brought files."""

    def start(nodes: Sequence[str], value: int = 0) -> list[bool]:
        """Save, the elements being `value` more than usual; or hold what is restored against `blocks_at`."""

        def work(group: Group) -> bool:
            checkpoints = AsyncSaves(tmp_path / nodes[group.rank], group)
            blocks, wanted = (blocks_at(5, group.rank, len(nodes)) for _ in range(2))
            if checkpoints.complete:
                for block in blocks:
                    block.tensor.fill_(-1)
                checkpoints.restore(blocks)
            else:
                for block in blocks:
                    block.tensor.add_(value)
                checkpoints.save(5, blocks, {"step": 5})
                assert checkpoints.wait()[0].error == ""
            checkpoints.close()
            return all(torch.equal(a.tensor, b.tensor) for a, b in zip(blocks, wanted, strict=True))

        return on_ranks(len(nodes), work)

    def torn(name: str, content: bytes) -> None:
        (tmp_path / "north" / "step-5" / name).write_bytes(content)

    start(["lost", "north"], value=7)
    assert start(["east", "west"]) == [True, True]
    nodes = ["east", "west", "north"]
    assert start(nodes) == [True] * 3, "north had the save of an attempt that was lost"
    start(["again", "south"], value=7)
    (tmp_path / "south" / "step-5").rename(tmp_path / "south" / "step-5.tmp")
    (tmp_path / "south" / "step-5.tmp" / NAME).unlink()
    assert start(["south", "east", "west"]) == [True] * 3, "south had files of an attempt that was lost, no save"
    torn(NAME, (tmp_path / "east" / "step-5" / NAME).read_bytes()[:50])
    assert start(nodes) == [True] * 3
    torn("model-00001.safetensors", b"")
    assert start(nodes) == [True] * 3


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    checkpoints = saved_until(tmp_path, 5)
    assert checkpoints.complete == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]
    more = AsyncSaves(tmp_path / "more", keep=3)
    for step in (10, 20, 30, 40, 40):
        more.save(step, blocks_at(step), {"step": step})
    assert [result.step for result in more.wait()] == [10, 20, 30, 40], "what is saved is not saved again"
    assert more.complete == [20, 30, 40]
    with pytest.raises(ConfigError, match="1 save is to be kept"):
        AsyncSaves(tmp_path, keep=1)


def test_to_go_on_from_an_earlier_one_removes_the_later(tmp_path: Path) -> None:
    checkpoints = saved_until(tmp_path, 5)
    blocks = [block._replace(tensor=block.tensor.clone()) for block in blocks_at(0)]
    opened = checkpoints.restore(blocks, step=4)
    assert opened.step == 4
    assert torch.equal(blocks[0].tensor, blocks_at(4)[0].tensor)
    assert checkpoints.complete == [4]
    checkpoints.save(5, blocks, {"step": 5})
    assert checkpoints.wait()[0].error == ""
    assert torch.equal(open_folder(tmp_path / "step-5").whole("w"), blocks_at(4)[0].tensor)
    with pytest.raises(WeightsError, match="no complete save of step 3"):
        checkpoints.open(3)
    shutil.rmtree(tmp_path)


def test_training_goes_on_while_it_writes(tmp_path: Path) -> None:
    """The tensors change after `save` returns and before the file is begun; what was there at the call is saved."""

    class Waiting(DurableDisk):
        def make_folder(self, folder: Path) -> None:
            assert changed.wait(20)
            super().make_folder(folder)

    changed = threading.Event()
    checkpoints = AsyncSaves(tmp_path, disk=Waiting())
    blocks = blocks_at(1)
    for step in (1, 2):
        changed.clear()
        blocks[0].tensor.copy_(blocks_at(step)[0].tensor)
        blocks[1].tensor.copy_(blocks_at(step)[1].tensor)
        checkpoints.save(step, blocks, {"step": step})
        assert checkpoints.finished() == []
        blocks[0].tensor.zero_()
        changed.set()
        assert [result.step for result in checkpoints.wait()] == [step]
        check(tmp_path, step)
