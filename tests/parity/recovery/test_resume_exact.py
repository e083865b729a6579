"""Stopped, saved and taken up again under the same layout: the weights and states after that are equal to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.selection import soak_but
from tests.support.training.training_step import Layout, Named, Rank, close, random_tokens, ranks_of
from tllm.comm.collectives.group import Group, local_groups
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.state.tensor_blocks import TensorBlock, model_blocks, optimizer_blocks

LAYOUTS = {
    "one": Layout(),
    "zero2 unequal": Layout(dp=(1, 3, 1), zero=2),
    "tensor": Layout(shares=((1, 2, 1),), dp=(1, 1), zero=1),
    "stages unlike": Layout(stages=2, order="1f1b", shares=((1, 1), (1,))),
}
STEPS, STOP = 3, 1


def blocks_of(rank: Rank) -> list[TensorBlock]:
    return [block for model in rank.chunks for block in model_blocks(model)] + optimizer_blocks(
        rank.update.state_slices()
    )


def learn(rank: Rank, group: Group, root: Path, stop: int) -> None:
    """From the last save, with nothing else left of what was, to step `stop`."""
    checkpoints, done = AsyncSaves(root, group), 0
    if checkpoints.latest is not None:
        blocks = blocks_of(rank)
        for block in blocks:
            block.tensor.fill_(torch.nan)
        done = checkpoints.restore(blocks).step
    for step in range(done, stop):
        rank.step(step + 1, random_tokens(5, seed=step), rate=0.01)
    checkpoints.save(stop, blocks_of(rank), {})
    assert [result.error for result in checkpoints.wait()] == [""]
    checkpoints.close()


def trained(folder: Path, layout: Layout, root: Path, stops: tuple[int, ...]) -> Named:
    for stop in stops:
        ranks = ranks_of(folder, layout, torch.bfloat16, weight_decay=0.1, clip=1.0)
        groups = local_groups(len(ranks), name="saves")
        in_threads([partial(learn, rank, group, root, stop) for rank, group in zip(ranks, groups, strict=True)])
        close(ranks)
    opened = open_folder(root / f"step-{stops[-1]}")
    return {name: opened.whole(name) for name in opened.shapes}


@pytest.mark.parametrize("name", soak_but([*LAYOUTS][1:], LAYOUTS))
def test_the_same_layout_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    save_model("llama", tmp_path / "model")
    found = trained(tmp_path / "model", layout, tmp_path / "stopped", (STOP, STEPS))
    want = trained(tmp_path / "model", layout, tmp_path / "whole", (STEPS,))
    assert found.keys() == want.keys()
    assert any(name.startswith("float32/") for name in found), "the wide weights of bfloat16 ones"
    different = [name for name in want if not torch.equal(found[name], want[name])]
    assert not different
