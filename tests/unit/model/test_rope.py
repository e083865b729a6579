"""Rotary angles: those of a token do not depend on which other tokens are computed with it."""

from __future__ import annotations

import math

import pytest
import torch

from tllm.model.rope import rotate, rotation
from tllm.spec.model_spec import RopeSpec

ROPES = {
    "default": RopeSpec(theta=10000.0, dim=8),
    "llama3": RopeSpec(theta=500000.0, dim=8, kind="llama3", factor=8.0, original=32, high_freq_factor=4.0),
    "dynamic": RopeSpec(theta=10000.0, dim=8, kind="dynamic", factor=4.0, original=32),
    "ministral3": RopeSpec(theta=10000.0, dim=8, kind="yarn", factor=4.0, original=16, query_scale_beta=0.3),
    "glm4": RopeSpec(theta=10000.0, dim=8, interleaved=True),
}


@pytest.mark.parametrize("name", ROPES)
def test_a_token_turns_the_same_in_any_company(name: str) -> None:
    positions_T, lengths_T = torch.arange(61), torch.arange(100, 161)
    whole = rotation(ROPES[name], positions_T, torch.float32, lengths_T)
    for start in range(0, 61, 7):
        for stop in range(start + 1, 62, 5):
            part = rotation(ROPES[name], positions_T[start:stop], torch.float32, lengths_T[start:stop])
            for ours, both in zip(part, whole, strict=True):
                if isinstance(both, torch.Tensor):
                    assert torch.equal(ours, both[start:stop])


def test_queries_grow_with_each_original_context() -> None:
    rope = ROPES["ministral3"]
    scale = rotation(rope, torch.tensor([0, 15, 16, 31, 32, 160]), torch.float64).query_scale
    want = [1.0, 1.0, 1 + 0.3 * math.log(2), 1 + 0.3 * math.log(2), 1 + 0.3 * math.log(3), 1 + 0.3 * math.log(11)]
    torch.testing.assert_close(scale, torch.tensor(want, dtype=torch.float64)[:, None, None], rtol=1e-6, atol=0)


def test_neighbours_turn_as_halves_do() -> None:
    """With its widths reordered, a head of neighbouring pairs is a head of halves. In float64 torch turns both."""
    x_TNH = torch.randn(5, 2, 10, generator=torch.Generator().manual_seed(0)).double()
    halves, neighbours = (rotation(ROPES[name], torch.arange(5), torch.float64) for name in ("default", "glm4"))
    order = [0, 4, 1, 5, 2, 6, 3, 7, 8, 9]
    assert torch.equal(rotate(x_TNH[..., order], neighbours), rotate(x_TNH, halves)[..., order])
