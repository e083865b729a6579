"""Numbers in fewer bytes: how far off they are, how many bytes they take, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from tllm.comm.collectives.compressed_activations import BLOCK, ActivationFormat, Bf16Activations, Int8Activations

FORMS = {"bf16": Bf16Activations(), "int8": Int8Activations()}


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10 ** (rank - 1)


def plainly(form: str, x: torch.Tensor) -> torch.Tensor:
    """What a message of `x` says, block by block as it is defined."""
    if form == "bf16" or not len(x):
        return x.bfloat16().float()
    blocks = []
    for block in x.split(BLOCK):
        step = float(block.abs().max()) / 127
        blocks.append((block / step).round() * step if step else block)
    return torch.cat(blocks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, BLOCK, 1000])
def test_numbers_come_back_rounded(form: str, count: int) -> None:
    x = numbers(2, count)
    message = FORMS[form].pack(x)
    blocks = -(-count // BLOCK)
    assert len(message) == FORMS[form].nbytes(count) == (2 * count if form == "bf16" else blocks * (4 + BLOCK))
    torch.testing.assert_close(FORMS[form].unpack(message, count), plainly(form, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values())
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_seen(form: ActivationFormat, value: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[3] = value
    said = form.unpack(form.pack(x), len(x))
    assert not said[3].isfinite()
    assert said[BLOCK:].isfinite().all(), "only its own block"
