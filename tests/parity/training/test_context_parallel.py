"""Training with a microbatch's tokens spread over cp ranks: loss, gradients and weights of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.training.test_training import narrow_weights
from tests.support.models.families import save_model
from tests.support.selection import EACH_PART, SOME, in_turn, soak_but
from tests.support.training.training_step import Layout, furthest, gradients_under, saved, train_under
from tllm.training.data.batch_tensors import Tokens
from tllm.training.optim.optimizer import AdamW

TP2, TP3 = ((1, 1),), ((1, 2, 1),)
CASES: dict[str, dict[str, Any]] = {
    "llama_dynamic": {},  # documents longer than 32 tokens have angles of their own
    "gemma2": {},
    "gemma4": dict(rms_norm_eps=3e-2),  # or small values would be made large by their norm, with their rounding
    "llama_mha_tied_bias": {},
    "mistral": {},
    "qwen2_sliding": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gpt_oss_moe": {},
    "deepseek_v3_moe": {},
    "phi3": dict(
        rope_scaling=dict(rope_type="longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0]),
        original_max_position_embeddings=128,
    ),
}
UNLIKE = ("llama_dynamic", "gemma2", "gpt_oss_moe", "deepseek_v3_moe", "phi3")
"""Of each kind of attention and of angles one."""

IN_FLOAT32_TOO = ("gemma2", "deepseek_v3_moe")
"""The others round by the same operations."""
LAYOUTS = (
    Layout(cp=2),
    Layout(cp=3),
    Layout(cp=4),
    Layout(cp=2, shares=TP3),
    Layout(cp=2, shares=TP2, sequence=True),
    Layout(2, "1f1b", cp=3),
    Layout(2, "zero_bubble", cp=2, shares=((1,), (1, 1)), dp=(2, 1)),
    Layout(2, "interleaved", chunks=2, cp=2, dp=(1, 1), recompute="layer"),
    Layout(2, "zero_bubble", cp=2, recompute="selective"),
)


def documents(count: int, seed: int = 3) -> list[Tokens]:
    """Microbatches with documents of odd lengths, some longer than a rank's part; one has fewer tokens than pieces."""
    dice = torch.Generator().manual_seed(seed)
    made = []
    for lengths in [[37, 1, 5, 13], [2, 1], [61], [3, 3, 3, 29, 1], [7] * 6][:count]:
        total = sum(lengths)
        ids_T, labels_T = torch.randint(0, 101, (2, total), generator=dice)
        labels_T[torch.rand(total, generator=dice) < 0.2] = -100
        made.append(Tokens(ids_T, labels_T, torch.cat([torch.arange(n) for n in lengths]), lengths))
    return made


@EACH_PART
@pytest.mark.parametrize("case", soak_but(UNLIKE, CASES))
def test_gradients_are_those_of_one_rank(case: str, part: str, tmp_path: Path) -> None:
    narrow_weights(tmp_path, save_model(case, tmp_path, **CASES[case]))
    shapes, microbatches = saved(tmp_path), documents(4)
    loss_1, want = gradients_under(tmp_path, Layout(), microbatches, torch.float64, shapes)
    for layout in in_turn(LAYOUTS, case, [*UNLIKE, *CASES], part):
        loss, got = gradients_under(tmp_path, layout, microbatches, torch.float64, shapes)
        assert abs(loss - loss_1) < 1e-12 * loss_1, layout
        off, name = furthest(got, want)
        assert off < 1e-12, f"{layout}: {name} is off by {off}"
    if part == SOME and case not in IN_FLOAT32_TOO:
        return
    _, narrow = gradients_under(tmp_path, Layout(), microbatches, torch.float32, shapes)
    _, got = gradients_under(tmp_path, Layout(cp=3), microbatches, torch.float32, shapes)
    # Biases of keys shift all scores of a query alike but for rope: one rank itself is 2e-6 from the truth there.
    assert furthest(got, want)[0] < max(1e-6, 1.5 * furthest(narrow, want)[0])


def test_experts_spread_over_replicas_whose_tokens_are_spread(tmp_path: Path) -> None:
    """All-to-all among replicas, a ring inside each, and a load-balance loss that counts a microbatch as a whole."""
    narrow_weights(tmp_path, save_model("qwen3_moe", tmp_path))
    shapes, microbatches = saved(tmp_path), documents(4)
    options = dict(optimizer=AdamW(), balance=0.1)
    want = train_under(tmp_path, Layout(), [microbatches], torch.float64, shapes, 1e-2, **options)
    got = train_under(tmp_path, Layout(cp=2, dp=(1, 1), ep=2), [microbatches], torch.float64, shapes, 1e-2, **options)
    torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=0)
    assert furthest(got[2], want[2])[0] < 1e-11  # AdamW's first step divides each gradient by its own size


STEPPED = [
    Layout(cp=2, dp=(2, 1), zero=2),
    Layout(2, "1f1b", cp=2, shares=TP2, sequence=True, zero=2),
    Layout(cp=3, zero=1),
]


@pytest.mark.parametrize("layout", soak_but(STEPPED[:2], STEPPED), ids=str)
def test_weights_after_some_steps_are_those_of_one_rank(layout: Layout, tmp_path: Path) -> None:
    """Ranges of weights are cut over the cp ranks too, and the norm counts each element once."""
    save_model("llama", tmp_path)
    shapes, batches = saved(tmp_path), [documents(3, seed) for seed in range(3)]
    options = dict(weight_decay=0.1, clip=1.0)
    want = train_under(tmp_path, Layout(), batches, torch.float64, shapes, 1e-2, **options)
    got = train_under(tmp_path, layout, batches, torch.float64, shapes, 1e-2, **options)
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=0)
    assert furthest(got[2], want[2])[0] < 1e-12
