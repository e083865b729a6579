"""The layout comparison must see each of these faults; a suite that stays green under one of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.model.test_layouts import prompt
from tests.support.models.families import save_model
from tests.support.models.layouts import logits_under
from tllm.comm.collectives.group import solo
from tllm.model.transformer import Transformer
from tllm.parallel.sequence_parallel import TensorParallelRegion

Mutation = Callable[[int, Transformer], None]


def lose_attention_sum(rank: int, model: Transformer) -> None:
    model.layers["1"].attention.o_proj.seam = TensorParallelRegion(solo())


def lose_mlp_sum(rank: int, model: Transformer) -> None:
    model.layers["1"].mlp.down_proj.seam = TensorParallelRegion(solo())


def lose_embedding_sum(rank: int, model: Transformer) -> None:
    model.embed_tokens.seam = TensorParallelRegion(solo())


def swap_attention_shards(rank: int, model: Transformer) -> None:
    """Rank 0 and rank 1 with each other's columns of o: here, rank 0 turned round."""
    weight = model.layers["0"].attention.o_proj.weight
    if rank == 0:
        weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)


def swap_gate_and_up(rank: int, model: Transformer) -> None:
    weight = model.layers["2"].mlp.gate_up_proj.weight
    weight.data = weight.data.roll(weight.shape[0] // 2, dims=0)


def shift_vocabulary(rank: int, model: Transformer) -> None:
    if rank == 1:
        model.lm_head.weight.data = model.lm_head.weight.data.roll(1, dims=0)


def skip_a_layer(rank: int, model: Transformer) -> None:
    del model.layers["3"]


def halve_the_scale(rank: int, model: Transformer) -> None:
    model.layers["0"].before_attention.weight.data *= 0.5


MUTATIONS: list[Mutation] = [
    lose_attention_sum,
    lose_mlp_sum,
    lose_embedding_sum,
    swap_attention_shards,
    swap_gate_and_up,
    shift_vocabulary,
    skip_a_layer,
    halve_the_scale,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model("llama", path)
    return path


def differs(folder: Path, mutate: Mutation = lambda rank, model: None, shift: int = 0) -> float:
    """The largest difference of tp=2 from the unsplit model; a disagreement between ranks is one of its own."""
    want = logits_under(folder, "pp=1", prompt(24), torch.float64)
    try:
        got = logits_under(folder, "tp=2", prompt(24), torch.float64, mutate, shift)
    except AssertionError:
        return float("inf")
    return (got - want).abs().max().item()


def test_without_a_fault_nothing_differs(folder: Path) -> None:
    assert differs(folder) < 1e-12


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_fault_in_one_place_shows(folder: Path, mutate: Mutation) -> None:
    assert differs(folder, mutate) > 1e-3


def test_one_rank_with_shifted_positions_shows(folder: Path) -> None:
    """Rotary embedding sees only distances, so the fault is a shift on one rank's cache: here, of one head's keys."""

    def shift_one_rank(rank: int, model: Transformer) -> None:
        if rank == 1:
            inner = model.forward
            model.forward = (
                lambda x, positions, attend, **more: inner(  # type: ignore[method-assign]
                    x, torch.cat([positions[:5], positions[5:] + 1]), attend, **more
                )
            )

    assert differs(folder, shift_one_rank) > 1e-3
