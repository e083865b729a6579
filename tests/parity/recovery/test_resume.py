"""Training that stops and goes on under another layout ends with the weights of training that never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.selection import soak_but
from tests.support.training.training_step import (
    Layout,
    Rank,
    close,
    furthest,
    gather,
    random_tokens,
    ranks_of,
    saved,
    train_under,
)
from tllm.comm.collectives.group import Group, local_groups
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.state.tensor_blocks import TensorBlock, model_blocks, optimizer_blocks

TP2, TP3 = ((1, 1),), ((1, 2, 1),)
CHANGES = (
    (Layout(), Layout(dp=(2, 1), zero=2)),
    (Layout(dp=(1, 1, 1), zero=1), Layout(2, "zero_bubble", shares=TP2)),
    (Layout(2, "1f1b", shares=TP3, dp=(1, 1), zero=2), Layout(2, "interleaved", chunks=2, dp=(1, 1))),
)
STEPS, STOP = 6, 3


def blocks_of(rank: Rank) -> list[TensorBlock]:
    return [block for model in rank.chunks for block in model_blocks(model)] + optimizer_blocks(
        rank.update.state_slices()
    )


def part_of_run(rank: Rank, group: Group, root: Path, steps: range) -> None:
    """Go on from the last save, if there is one, and save."""
    checkpoints = AsyncSaves(root, group)
    if checkpoints.latest is not None:
        assert checkpoints.restore(blocks_of(rank)).step == steps.start
    for step in steps:
        rank.step(step + 1, random_tokens(5, step), 1e-2)
    checkpoints.save(steps.stop, blocks_of(rank), {})
    assert [result.error for result in checkpoints.wait()] == [""]
    checkpoints.close()


@pytest.mark.parametrize(("before", "after"), soak_but(CHANGES[1:], CHANGES))
def test_another_layout_goes_on_where_one_stopped(before: Layout, after: Layout, tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    shapes = saved(tmp_path)
    options = dict(weight_decay=0.1, clip=1.0)
    batches = [random_tokens(5, step) for step in range(STEPS)]
    _, _, want = train_under(tmp_path, Layout(), batches, torch.float64, shapes, 1e-2, **options)
    for layout, steps in ((before, range(STOP)), (after, range(STOP, STEPS))):
        ranks = ranks_of(tmp_path, layout, torch.float64, **options)
        groups = local_groups(len(ranks), name="save")
        in_threads(
            [
                partial(part_of_run, rank, group, tmp_path / "run", steps)
                for rank, group in zip(ranks, groups, strict=True)
            ]
        )
        close(ranks)
    got = gather(ranks, lambda rank, index: rank.parameters[index], shapes)
    off, name = furthest(got, want)
    assert off < 1e-12, f"{name} is off by {off}"
