from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tllm.training.optim.optimizer import SGD, AdamW, Optimizer


def follow(rule: Optimizer, parts: list[slice], steps: int, dtype: torch.dtype) -> Tensor:
    """Weights after some steps, updated part by part."""
    dice = torch.Generator().manual_seed(0)
    weights = torch.randn(1003, generator=dice, dtype=dtype)
    state = {name: torch.zeros_like(weights) for name in rule.states}
    for step in range(1, steps + 1):
        gradient = torch.randn(1003, generator=dice, dtype=dtype)
        for part in parts:
            rule.update(weights[part], gradient[part], {k: v[part] for k, v in state.items()}, step, 1e-2 / step, 0.1)
    return weights


def follow_torch(make: type[torch.optim.Optimizer], steps: int, dtype: torch.dtype, **options: object) -> Tensor:
    dice = torch.Generator().manual_seed(0)
    weights = nn.Parameter(torch.randn(1003, generator=dice, dtype=dtype))
    theirs = make([weights], lr=1e-2, weight_decay=0.1, **options)
    for step in range(1, steps + 1):
        weights.grad = torch.randn(1003, generator=dice, dtype=dtype)
        theirs.param_groups[0]["lr"] = 1e-2 / step
        theirs.step()
    return weights.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_as_torch(dtype: torch.dtype) -> None:
    close = {"rtol": 1e-6 if dtype == torch.float32 else 1e-14, "atol": 0}
    for ours, theirs in (
        (AdamW(0.8, 0.95, 1e-7), follow_torch(torch.optim.AdamW, 20, dtype, betas=(0.8, 0.95), eps=1e-7)),
        (SGD(0.9), follow_torch(torch.optim.SGD, 20, dtype, momentum=0.9)),
        (SGD(0.8, nesterov=True), follow_torch(torch.optim.SGD, 20, dtype, momentum=0.8, nesterov=True)),
    ):
        torch.testing.assert_close(follow(ours, [slice(None)], 20, dtype), theirs, **close)


@pytest.mark.parametrize("rule", [AdamW(), SGD(nesterov=True)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_range_is_updated_to_the_same_bits_as_the_whole(rule: Optimizer, dtype: torch.dtype) -> None:
    parts = [slice(0, 3), slice(3, 3), slice(3, 500), slice(500, 1003)]
    assert torch.equal(follow(rule, parts, 5, dtype), follow(rule, [slice(None)], 5, dtype))
