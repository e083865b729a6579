"""A step of training under every pipeline order: each parameter's gradient is the one-process run's to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.families import TRAINABLE, save_model
from tests.support.models.reference_gradients import in_float64
from tests.support.selection import EACH_PART, in_turn, soak_but
from tests.support.training.training_step import (
    Layout,
    furthest,
    gradients_of_transformers,
    gradients_under,
    random_tokens,
    saved,
)
from tllm.core.errors import PlanError
from tllm.model.transformer import Transformer

LAYOUTS = (
    Layout(2),
    Layout(3, "1f1b", layers=(1, 2, 1)),
    Layout(2, "1f1b", depth=3),
    Layout(2, "zero_bubble"),
    Layout(3, "zero_bubble", depth=2, layers=(2, 1, 1)),
    Layout(2, "interleaved", chunks=2),
    Layout(1, "interleaved", chunks=3),
    Layout(4, "zero_bubble"),
)


HERE = ("llama", "llama_mha_tied_bias", "gemma2", "gemma4_moe", "qwen2_moe", "gpt_oss_moe", "deepseek_v3_moe")
"""One for each order. What a stage hands on is the same in all families."""


@EACH_PART
@pytest.mark.parametrize("case", soak_but(HERE, TRAINABLE))
def test_every_order_gives_the_gradients_of_transformers(case: str, part: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(3)
    loss_32, rounded = gradients_of_transformers(truth, microbatches, tmp_path / "float32")
    with in_float64(truth):
        loss, want = gradients_of_transformers(truth, microbatches, tmp_path / "float64")
    # Each dtype may be as far from the truth as `transformers` itself is in it.
    rounds = {torch.float32: max(abs(loss_32 - loss) / loss, furthest(rounded, want)[0]), torch.float64: 1e-13}
    for dtype, limit in ((torch.float32, 2e-7), (torch.float64, 1e-15)):
        loss_1, unsplit = gradients_under(tmp_path, Layout(), microbatches, dtype, shapes)
        assert max(abs(loss_1 - loss) / loss, furthest(unsplit, want)[0]) < 2 * rounds[dtype]
        is_tied = truth.config.tie_word_embeddings  # which some layouts refuse: see below
        cuts = [layout for layout in LAYOUTS if layout.stages > 1 or not is_tied]
        for layout in in_turn(cuts, case, [*HERE, *TRAINABLE], part, count=1):
            loss_n, got = gradients_under(tmp_path, layout, microbatches, dtype, shapes)
            assert loss_n == loss_1, layout
            off, name = furthest(got, unsplit)
            assert off < limit, f"{layout}: {name} is off by {off}"


def test_a_tied_table_twice_on_one_rank_is_refused(tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    with pytest.raises(PlanError, match="2 of its 3 chunks"):
        gradients_under(tmp_path, Layout(1, "interleaved", chunks=3), random_tokens(2), torch.float64, saved(tmp_path))


def lose_a_boundary(stage: int, chunks: list[Transformer]) -> None:
    """The second stage learns from a gradient that is half of what it should be."""
    if stage == 1:
        chunks[0].layers["2"].register_full_backward_hook(lambda module, given, taken: (given[0] * 0.5, *given[1:]))


def skip_a_layer(stage: int, chunks: list[Transformer]) -> None:
    if stage == 1:
        del chunks[0].layers["3"]


@pytest.mark.parametrize("mutate", [lose_a_boundary, skip_a_layer])
def test_a_fault_on_one_stage_shows(mutate: object, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shapes, microbatches = saved(tmp_path), random_tokens(3)
    _, want = gradients_under(tmp_path, Layout(2), microbatches, torch.float64, shapes)
    _, got = gradients_under(tmp_path, Layout(2), microbatches, torch.float64, shapes, mutate)  # type: ignore[arg-type]
    assert max(float((got[n] - want[n]).norm() / want[n].norm()) for n in got) > 1e-3
