"""Which saves stay, against what transformers' own Trainer leaves; saves that fail, and a restart."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from transformers.trainer_utils import rotate_checkpoints

from tests.unit.training.checkpoint.test_kills import blocks_at
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.retention import Retention


def rotated(folder: Path, step: int, best: int, limit: int) -> list[int]:
    """The steps that transformers' Trainer leaves when it has saved one more."""
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    rotate_checkpoints(str(folder), limit, str(folder / f"checkpoint-{best}"))
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.iterdir())


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_the_best_counts_within_the_limit_as_in_transformers(limit: int, tmp_path: Path) -> None:
    dice = random.Random(limit)
    for number in range(12):
        retention = Retention(limit, lambda step, facts: facts.get("worth"))
        complete: list[int] = []
        worths: dict[int, float] = {}
        for step in range(10, 130, 10):
            worths[step] = dice.randrange(6)
            retention.found(step, {"worth": worths[step]})
            best = max([*complete, step], key=lambda one: (worths[one], -one))
            want = rotated(tmp_path / str(number), step, best, limit)
            complete = retention.kept([*complete, step])
            assert complete == want and retention.best(complete) == best


def test_saves_that_were_not_compared_are_never_the_best() -> None:
    retention = Retention(2, lambda step, facts: facts.get("worth"))
    for step, worth in ((1, None), (2, 0.5), (3, math.nan), (4, None)):
        retention.found(step, {"worth": worth})
    assert retention.best([1, 3, 4]) is None and retention.kept([1, 3, 4]) == [3, 4]
    assert retention.best([1, 2, 3, 4]) == 2 and retention.kept([1, 2, 3, 4]) == [2, 4]
    retention.found(2, {})
    assert retention.best([2]) is None, "a save that took the place of another is not worth what that was"


def worth_of(step: int, facts: object) -> float | None:
    assert isinstance(facts, dict) and facts["step"] == step
    return -abs(step - 20)


class FullAt(DurableDisk):
    """Has no room for the save of a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.full = f"step-{step}.tmp"

    def make_folder(self, path: Path) -> None:
        if path.name == self.full:
            raise OSError(28, "No space left on device", str(path))
        super().make_folder(path)


def test_the_best_save_is_spared_and_known_again_after_a_restart(tmp_path: Path) -> None:
    saves = AsyncSaves(tmp_path, worth=worth_of)
    for step in (10, 20, 30, 40):
        saves.save(step, blocks_at(step), {"step": step})
    assert all(result.error == "" for result in saves.wait())
    assert saves.complete == [20, 40] and saves.best == 20 and saves.latest == 40
    saves.close()
    again = AsyncSaves(tmp_path, worth=worth_of)
    assert again.best == 20
    again.save(50, blocks_at(50), {"step": 50})
    again.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-50"]
    again.close()
    without = AsyncSaves(tmp_path)
    assert without.best is None
    without.close()


def test_a_save_that_failed_is_never_the_best(tmp_path: Path) -> None:
    saves = AsyncSaves(tmp_path, disk=FullAt(20), worth=worth_of)
    for step in (10, 20, 40, 50):
        saves.save(step, blocks_at(step), {"step": step})
    assert [bool(result.error) for result in saves.wait()] == [False, True, False, False]
    assert saves.complete == [10, 50] and saves.best == 10
    saves.close()
