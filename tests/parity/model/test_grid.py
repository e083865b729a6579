"""A model on grids of ranks (2D, 2.5D and 3D tensor parallelism): logits and all gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.families import save_model
from tests.support.models.grid_gradients import gradients_on_grid, ranks_on_grid
from tests.support.models.layouts import logits_under
from tests.support.models.reference_gradients import apart, gradients_under, packed
from tests.support.selection import EACH_PART, covering, in_turn, soak_but
from tllm.parallel.shard import Shard, shard_of

GRIDS = ("tp=4,tensor=2d", "tp=9,tensor=2d", "tp=8,tensor=2.5d", "tp=8,tensor=3d")
LARGE = ("tp=16,tensor=2d", "tp=16,tensor=2.5d")
FAMILIES = (
    *("llama", "llama_mha_tied_bias", "llama_mqa", "llama_dynamic", "qwen2", "qwen3", "mistral", "phi3"),
    *("gemma2", "gemma3", "olmo2"),
)
"""Tied and untied tables, biases, fused projections, norms of heads and of all heads, windows, caps, scaled embeddings:
what dense models have."""

WITH_PARTS_OF_THEIR_OWN = ("llama_mqa", "qwen3", "phi3", "gemma2", "olmo2")
"""Beside the two that every grid or another meets whole."""

TOKENS = packed([1, 7, 7, 18, 40])  # fewer documents than some grids have blocks, so that some are filling alone


def distances(folder: Path, grid: str, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """How far the loss, the logits and each gradient on a grid are from those of one process."""
    loss, logits_TV, got = gradients_on_grid(ranks_on_grid(folder, grid, TOKENS, dtype), TOKENS, folder)
    want_loss, want = gradients_under(folder, "pp=1", TOKENS, torch.float64)
    found = apart(got, want)
    alone = [logits_under(folder, "pp=1", ids_T, torch.float64) for ids_T in TOKENS.ids_T.split(TOKENS.lengths)]
    found["loss"] = float((loss - want_loss).abs() / want_loss)
    found["logits"] = float((logits_TV - torch.cat(alone)).abs().max() / torch.cat(alone).abs().max())
    return found


@pytest.mark.parametrize(("case", "grid"), covering(["llama", "llama_mha_tied_bias"], GRIDS))
def test_a_model_on_a_grid_is_that_of_one_process(case: str, grid: str, tmp_path: Path) -> None:
    """8 query heads on 2, 3 or 4 columns; 2 key-value heads, which several columns then share."""
    save_model(case, tmp_path)
    for name, distance in distances(tmp_path, grid).items():
        assert distance < 1e-13, f"{case} {grid} {name}: {distance:.1e}"


@pytest.mark.parametrize("grid", soak_but(LARGE[:1], LARGE))
def test_sixteen_ranks_do_too(grid: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert max(distances(tmp_path, grid).values()) < 1e-13


@pytest.mark.slow
@EACH_PART
@pytest.mark.parametrize("case", soak_but(WITH_PARTS_OF_THEIR_OWN, FAMILIES))
def test_every_dense_family_has_the_same_gradients(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    for grid in in_turn([*GRIDS], case, [*WITH_PARTS_OF_THEIR_OWN, *FAMILIES], part, count=1):
        for name, distance in distances(tmp_path, grid).items():
            assert distance < 1e-13, f"{case} {grid} {name}: {distance:.1e}"


@pytest.mark.parametrize("grid", ["tp=4,tensor=2d", "tp=8,tensor=3d"])
def test_widths_that_no_side_divides(grid: str, tmp_path: Path) -> None:
    odd = dict(hidden_size=35, intermediate_size=53, vocab_size=101, num_attention_heads=5, num_key_value_heads=1)
    save_model("llama", tmp_path, head_dim=6, **odd)
    assert max(distances(tmp_path, grid).values()) < 1e-13


def test_a_gradient_that_is_left_in_parts_shows(tmp_path: Path) -> None:
    """A norm's weight has a part of its gradient on each row of the grid."""
    save_model("llama", tmp_path)
    ranks = ranks_on_grid(tmp_path, "tp=4,tensor=2d", TOKENS, torch.float64)
    for rank in ranks:
        norm: nn.Parameter = rank.model.norm.weight
        norm.shard = Shard(shard_of(norm).pieces, True, "whole")  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=r"ranks differ on the gradient of model\.norm\.weight"):
        gradients_on_grid(ranks, TOKENS, tmp_path)


def test_ranks_of_a_column_agree_on_what_they_share_to_the_bit(tmp_path: Path) -> None:
    """`put_together` holds this for gradients; logits of the same tokens are never computed twice."""
    save_model("llama", tmp_path)
    ranks = ranks_on_grid(tmp_path, "tp=8,tensor=2.5d", TOKENS, torch.float32)
    loss, _, got = gradients_on_grid(ranks, TOKENS, tmp_path)
    want: dict[str, Tensor]
    want_loss, want = gradients_under(tmp_path, "pp=1", TOKENS, torch.float64)
    assert float((loss - want_loss).abs() / want_loss) < 1e-6
    assert max(apart(got, want).values()) < 1e-4
