"""Rotary angles: those of a token do not depend on which other tokens are computed with it."""

from __future__ import annotations

import pytest
import torch

from tllm.model.rope import rotation
from tllm.spec.model_spec import RopeSpec

ROPES = {
    "default": RopeSpec(theta=10000.0, dim=8),
    "llama3": RopeSpec(theta=500000.0, dim=8, kind="llama3", factor=8.0, original=32, high_freq_factor=4.0),
    "dynamic": RopeSpec(theta=10000.0, dim=8, kind="dynamic", factor=4.0, original=32),
}


@pytest.mark.parametrize("name", ROPES)
def test_a_token_turns_the_same_in_any_company(name: str) -> None:
    positions_T, lengths_T = torch.arange(61), torch.arange(100, 161)
    whole = rotation(ROPES[name], positions_T, torch.float32, lengths_T)
    for start in range(0, 61, 7):
        for stop in range(start + 1, 62, 5):
            part = rotation(ROPES[name], positions_T[start:stop], torch.float32, lengths_T[start:stop])
            assert all(torch.equal(ours, both[start:stop]) for ours, both in zip(part, whole, strict=True))
