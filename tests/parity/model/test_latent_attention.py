"""Attention over latents: its faults show, and the cache holds one latent for each token and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.model.test_layouts import prompt
from tests.support.models.families import save_model
from tests.support.models.layouts import logits_under, spec_of
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.schedule.limits import Limits
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import whole
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.plan import Plan

Mutation = Callable[[int, Transformer], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek_v3")
    save_model("deepseek_v3_moe", path)
    return path


def take_the_neighbours_keys(rank: int, model: Transformer) -> None:
    keys = model.layers["1"].attention.keys.weight
    keys.data = keys.data.roll(1, dims=0)


def take_the_neighbours_values(rank: int, model: Transformer) -> None:
    if rank == 0:
        values = model.layers["1"].attention.values.weight
        values.data = values.data.roll(1, dims=0)


def leave_the_latent_as_it_is(rank: int, model: Transformer) -> None:
    model.layers["1"].attention.kv_norm = torch.nn.Identity()


def forget_to_rotate(rank: int, model: Transformer) -> None:
    model.layers["1"].rope = None


MUTATIONS: list[Mutation] = [
    take_the_neighbours_keys,
    take_the_neighbours_values,
    leave_the_latent_as_it_is,
    forget_to_rotate,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_fault_in_one_place_shows(mutate: Mutation, folder: Path) -> None:
    want = logits_under(folder, "pp=1", prompt(24), torch.float64)
    got = logits_under(folder, "tp=2", prompt(24), torch.float64, mutate)
    assert (got - want).abs().max() > 1e-3


def test_the_cache_holds_each_latent_once(folder: Path) -> None:
    spec = spec_of(folder)
    limits = Limits(
        num_pages=3,
        vocab_size=spec.vocab_size,
        max_model_len=64,
        page_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        num_speculative_tokens=0,
    )
    model = build(spec, whole(spec), torch.float32)
    cache = KVCache(model.attention_specs(), limits, torch.float32)
    (rank,) = rank_bytes(spec, Plan.parse("pp=1", spec.num_layers), "float32")
    assert cache.num_bytes == 3 * 4 * rank.kv_per_token == 3 * 4 * spec.num_layers * (20 + 4) * 4
