"""What a process measures of itself before it serves."""

from __future__ import annotations

import torch

from tests.unit.planner.test_search import spec_of
from tllm.engine.speed import serving_passes


def test_all_that_a_token_takes_is_measured() -> None:
    """Layers whole and in half, a token of each sequence and a prompt; logits; a driver's step and a follower's."""
    layers, logits, turns, follows = serving_passes(spec_of(4), torch.float32, (1, 3), prompt=20, chunk=16, seconds=0.3)
    assert [(one.rows, one.ranks, one.keys) for one in layers] == [
        (rows, ranks, keys) for ranks in (1, 2) for rows, keys in ((1, 20), (3, 20), (16, 0))
    ]
    assert [one.rows for one in logits] == [one.rows for one in turns] == [one.rows for one in follows] == [1, 3]
    assert all(one.seconds > 0 for one in (*layers, *logits, *turns, *follows))
