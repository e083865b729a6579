"""Training with servers that hold weights and state: synchronous it is data parallel, by whatever rows it pulls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.families import save_model
from tests.support.served import train_served
from tests.support.training import Layout, furthest, random_tokens, saved, train_under
from tllm.train.optimizer import SGD, AdamW

SHAPES = [((1,), 1), ((1, 1), 2), ((3, 1, 1), 1), ((1, 2, 2), 3), ((1,) * 7, 2)]
"""Replicas' shares and servers; of seven replicas at least two get none of five microbatches."""


@pytest.mark.parametrize("case", ["llama", "llama_mha_tied_bias"], ids=["untied", "tied"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_synchronous_is_data_parallel(case: str, clip: float, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(5, seed) for seed in range(3)]
    options = dict(optimizer=AdamW(), weight_decay=0.1)
    for shares, servers in SHAPES:
        layout = Layout(dp=shares)
        want = train_under(tmp_path, layout, batches, torch.float64, shapes, 1e-2, clip=clip or None, **options)
        got = train_served(tmp_path, shares, servers, batches, torch.float64, shapes, 1e-2, clip=clip, **options)
        assert want[1][0] > 1.0, "where there is a limit, it is met"
        torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=0)
        off, name = furthest(got[2], want[2])
        assert off < 1e-12, f"{shares} over {servers}: {name} is off by {off}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_limit_it_is_data_parallel_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(5, seed) for seed in range(3)]
    for optimizer in (AdamW(), SGD(nesterov=True)):
        options = dict(optimizer=optimizer, weight_decay=0.1)
        for shares, servers in SHAPES:
            want = train_under(tmp_path, Layout(dp=shares), batches, dtype, shapes, 1e-2, **options)
            got = train_served(tmp_path, shares, servers, batches, dtype, shapes, 1e-2, **options)
            assert got[0] == want[0]
            assert all(torch.equal(got[2][name], want[2][name]) for name in want[2])


def test_float32_with_a_limit_differs_by_the_rounding_of_the_norm(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(5, seed) for seed in range(3)]
    options = dict(optimizer=SGD(), clip=0.5)
    want = train_under(tmp_path, Layout(dp=(1, 1)), batches, torch.float32, shapes, 1e-2, **options)
    got = train_served(tmp_path, (1, 1), 2, batches, torch.float32, shapes, 1e-2, **options)
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=0)
    assert furthest(got[2], want[2])[0] < 1e-6
