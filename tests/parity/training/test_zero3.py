"""Weights spread over dp between their uses end where weights that every rank holds whole do: to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.selection import soak_but
from tests.support.training.training_step import (
    Layout,
    Named,
    Rank,
    close,
    furthest,
    random_tokens,
    ranks_of,
    saved,
    train_under,
)
from tllm.comm.collectives.group import Group, local_groups
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.objectives import log_probs
from tllm.training.optim.optimizer import SGD, AdamW

TP2, TP3 = ((1, 1),), ((1, 2, 1),)


def learned(
    folder: Path, layout: Layout, dtype: torch.dtype, steps: int, rule: AdamW | SGD
) -> tuple[list[float], Named]:
    """Losses and weights. Gradients are not clipped, as their norm is added up in another order for each `zero`."""
    batches = [random_tokens(4, seed) for seed in range(steps)]
    losses, _, weights = train_under(
        folder, layout, batches, dtype, saved(folder), 1e-2, optimizer=rule, weight_decay=0.1
    )
    return losses, weights


@pytest.mark.parametrize(
    ("case", "dtype", "ranks", "steps"),
    [
        ("llama", torch.float32, 2, 5),
        ("llama_mha_tied_bias", torch.bfloat16, 4, 4),
        *soak_but(
            [],
            [
                ("llama", torch.float32, 2, 30),
                ("llama_mha_tied_bias", torch.bfloat16, 4, 30),
                ("llama_mha_tied_bias", torch.float32, 4, 30),
                ("qwen3_moe", torch.float32, 2, 30),
                ("gemma2", torch.float64, 2, 30),
                ("olmo2", torch.bfloat16, 2, 30),
            ],
        ),
    ],
)
def test_steps_end_with_the_bits_of_zero_0(
    case: str, dtype: torch.dtype, ranks: int, steps: int, tmp_path: Path
) -> None:
    save_model(case, tmp_path)
    plain = Layout(dp=(1,) * ranks)
    losses, want = learned(tmp_path, plain, dtype, steps, AdamW())
    got_losses, got = learned(tmp_path, replace(plain, zero=3), dtype, steps, AdamW())
    assert losses == got_losses and losses[0] - losses[-1] > 0.01
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


LAYOUTS = {
    "gpipe": Layout(2, "gpipe", dp=(1, 1)),
    "1f1b, tp of unlike size": Layout(2, "1f1b", shares=((1, 1), (2, 1, 1)), dp=(1, 1)),
    "interleaved": Layout(2, "interleaved", chunks=2, dp=(1, 1)),
    "zero bubble": Layout(2, "zero_bubble", shares=TP2, dp=(1, 1)),
    "sequence": Layout(shares=TP3, sequence=True, dp=(1, 1)),
    "layers again": Layout(dp=(1, 1), recompute="layer"),
    "zero bubble, layers again": Layout(2, "zero_bubble", dp=(1, 1), recompute="layer"),
    "attention again": Layout(2, "1f1b", dp=(1, 1), recompute="selective"),
    "context": Layout(cp=2, dp=(1, 1)),
}


@pytest.mark.parametrize(
    "name",
    soak_but([name for name in LAYOUTS if name not in ("gpipe", "sequence", "zero bubble", "layers again")], LAYOUTS),
)
def test_every_layout_goes_with_it(name: str, tmp_path: Path) -> None:
    """SGD follows each gradient as it is, where AdamW would hide its size."""
    save_model("llama_mha_tied_bias", tmp_path)
    layout = LAYOUTS[name]
    _, want = learned(tmp_path, layout, torch.float32, 2, SGD())
    _, got = learned(tmp_path, replace(layout, zero=3), torch.float32, 2, SGD())
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, ignored: int) -> Tensor:
    """What a GPU's kernel makes of logits, in torch's steps."""
    return F.cross_entropy(logits_TV, labels_T, ignore_index=ignored, reduction="none")


def test_a_head_whose_losses_a_gpu_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All forwards come before the first backward: each pass of these gathers the head's weights for itself."""
    kernels = SimpleNamespace(loss=SimpleNamespace(cross_entropy=cross_entropy))
    monkeypatch.setattr(log_probs, "gpu_kernels", lambda kind: kernels)
    save_model("llama", tmp_path)
    layout = Layout(2, "gpipe", dp=(1, 1))
    _, want = learned(tmp_path, layout, torch.float32, 2, SGD())
    _, got = learned(tmp_path, replace(layout, zero=3), torch.float32, 2, SGD())
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_spread_over_those_that_hold_them(ranks: int, tmp_path: Path) -> None:
    """With 2 ranks nobody else holds an expert, and it stays whole; with 4 two ranks share its weights."""
    save_model("mixtral", tmp_path, num_local_experts=4)
    layout = Layout(dp=(1,) * ranks, ep=2)
    _, want = learned(tmp_path, layout, torch.float32, 2, SGD())
    _, got = learned(tmp_path, replace(layout, zero=3), torch.float32, 2, SGD())
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


CHANGES = (
    (Layout(dp=(1, 1), zero=3), Layout(2, "zero_bubble", shares=TP2)),
    (Layout(dp=(3, 1), zero=2), Layout(2, "1f1b", shares=TP3, dp=(1, 1), zero=3)),
    (Layout(2, "gpipe", dp=(1, 1), zero=3), Layout(dp=(1, 1, 1, 1), zero=3)),
)
STEPS, STOP = 4, 2


def part_of_run(rank: Rank, group: Group, root: Path, steps: range) -> None:
    """Go on from the last save, with nothing else left of what was, and save."""
    checkpoints = AsyncSaves(root, group)
    if checkpoints.latest is not None:
        blocks = rank.update.blocks()
        for block in blocks:
            block.tensor.fill_(torch.nan)
        assert checkpoints.restore(blocks).step == steps.start
    for step in steps:
        rank.step(step + 1, random_tokens(4, step), 1e-2)
    checkpoints.save(steps.stop, rank.update.blocks(), {})
    assert [result.error for result in checkpoints.wait()] == [""]
    checkpoints.close()


def run_of(folder: Path, root: Path, parts: list[tuple[Layout, range]], dtype: torch.dtype) -> Named:
    for layout, steps in parts:
        ranks = ranks_of(folder, layout, dtype, weight_decay=0.1)
        groups = local_groups(len(ranks), name="save")
        in_threads([partial(part_of_run, rank, group, root, steps) for rank, group in zip(ranks, groups, strict=True)])
        close(ranks)
    opened = open_folder(root / f"step-{STEPS}")
    return {name: opened.whole(name) for name in opened.shapes}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), soak_but(CHANGES[1:2], CHANGES))
def test_another_layout_goes_on_where_one_stopped(before: Layout, after: Layout, tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    want = run_of(tmp_path, tmp_path / "whole", [(Layout(), range(STEPS))], torch.float64)
    got = run_of(tmp_path, tmp_path / "changed", [(before, range(STOP)), (after, range(STOP, STEPS))], torch.float64)
    off, name = furthest(got, want)
    assert off < 1e-12, f"{name} is off by {off}"


def test_sixteen_bit_weights_go_on_to_the_bit(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spread, whole = Layout(dp=(1, 1), zero=3), Layout(dp=(1, 1))
    want = run_of(tmp_path, tmp_path / "whole", [(whole, range(STEPS))], torch.bfloat16)
    got = run_of(tmp_path, tmp_path / "spread", [(spread, range(STOP)), (spread, range(STOP, STEPS))], torch.bfloat16)
    assert got.keys() == want.keys() and any(name.startswith("float32/") for name in got)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
