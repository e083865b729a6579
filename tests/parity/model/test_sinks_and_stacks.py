"""What gpt_oss has of its own: each of these faults in its sinks, its stacks of experts or its router shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parity.model.test_layouts import prompt
from tests.support.models.families import save_model
from tests.support.models.layouts import logits_under
from tllm.model.moe import clamped_swiglu
from tllm.model.transformer import Transformer

Mutation = Callable[[int, Transformer], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt_oss")
    save_model("gpt_oss_moe", path)
    return path


def lose_the_sinks(rank: int, model: Transformer) -> None:
    model.layers["1"].attention.sinks.data.fill_(float("-inf"))


def turn_the_sinks(rank: int, model: Transformer) -> None:
    model.layers["1"].attention.sinks.data = model.layers["1"].attention.sinks.data.roll(1)


def swap_gate_and_up(rank: int, model: Transformer) -> None:
    experts = model.layers["2"].mlp.experts
    experts.gate_up.data = experts.gate_up.data.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def add_a_bias_on_every_rank(rank: int, model: Transformer) -> None:
    experts = model.layers["2"].mlp.experts
    if experts.down_bias is None:
        experts.down_bias = nn.Parameter(torch.ones(experts.count, model.spec.hidden_size, dtype=experts.down.dtype))


def lose_a_bias(rank: int, model: Transformer) -> None:
    model.layers["2"].mlp.experts.gate_up_bias.data.zero_()


def clamp_nothing(rank: int, model: Transformer) -> None:
    model.layers["2"].mlp.experts.act = clamped_swiglu(1e9, 1.5)


def take_the_share_of_all(rank: int, model: Transformer) -> None:
    router = model.layers["2"].mlp.router
    router.moe = replace(router.moe, scores="softmax")


MUTATIONS: list[Mutation] = [
    lose_the_sinks,
    turn_the_sinks,
    swap_gate_and_up,
    add_a_bias_on_every_rank,
    lose_a_bias,
    clamp_nothing,
    take_the_share_of_all,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_fault_in_one_place_shows(mutate: Mutation, folder: Path) -> None:
    want = logits_under(folder, "pp=1", prompt(24), torch.float64)
    got = logits_under(folder, "tp=2", prompt(24), torch.float64, mutate)
    assert (got - want).abs().max() > 1e-3
