"""What a process measures of itself before it serves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.engine import stage
from tllm.engine.measure import benchmark_layers
from tllm.engine.measure.benchmark_layers import LayersAsModel
from tllm.engine.measure.layer_speed import ServingSizes, serving_passes
from tllm.spec.request import Output

SLOW = 0.05


@pytest.mark.usefixtures("own_clock")
def test_all_that_a_token_takes_is_measured() -> None:
    """Layers whole and in half, a token of each sequence and a prompt; logits; a driver's step and a follower's."""
    given: list[Output] = []
    found = serving_passes(
        spec_of(4), torch.float32, ServingSizes((1, 3), prompt=20, chunk=16), seconds=0.3, deliver=given.extend
    )
    layers, logits, turns, follows, unplayed, cooled, rest, rested, keys_read = found
    assert [(one.rows, one.ranks, one.keys) for one in layers] == [
        (rows, ranks, keys) for ranks in (1, 2) for rows, keys in ((1, 20), (3, 20), (16, 0))
    ]
    assert [one.rows for one in logits] == [one.rows for one in turns] == [one.rows for one in follows] == [1, 3]
    assert all(one.seconds > 0 for one in (*layers, *logits, *turns, *follows))
    assert 0 <= unplayed < 1 and 0 <= cooled < 1 and 0 <= rest < 1 and 0 < rested < 1
    assert keys_read == 0, "plain weights are read as fast"
    assert given and all(len(one.token_ids) == 1 for one in given), "tokens are handed out"


@pytest.mark.usefixtures("own_clock")
def test_a_rest_costs_what_the_next_step_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm.engine.measure.layer_speed.REST", 0.05)
    rest = serving_passes(spec_of(4), torch.float32, ServingSizes((1,), prompt=20, chunk=16), seconds=0.3).rest
    assert 0 <= rest < 0.05, "the rest itself is not counted"


@pytest.mark.usefixtures("own_clock")
def test_layers_whose_operations_are_slow_to_call_are_so_where_they_are_not_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*values: Any) -> Tensor:
        time.sleep(SLOW)
        return plain(*values)

    plain = benchmark_layers._forward
    monkeypatch.setattr(benchmark_layers, "_forward", late)
    found = serving_passes(spec_of(4), torch.float32, ServingSizes((1,), prompt=20, chunk=16), seconds=0.3)
    assert found.layers[0].seconds < SLOW / 8 < found.unplayed


@pytest.mark.usefixtures("own_clock", "computed")
def test_layers_that_are_slow_in_a_step_make_it_cool_and_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them it takes what it took."""

    def late(self: LayersAsModel, *values: Any) -> Tensor:
        time.sleep(SLOW)
        return plain(self, *values)

    plain = LayersAsModel.__call__
    monkeypatch.setattr(LayersAsModel, "__call__", late)
    found = serving_passes(spec_of(4), torch.float32, ServingSizes((1,), prompt=20, chunk=16), seconds=0.3)
    assert max(found.turns[0].seconds, found.follows[0].seconds) < SLOW / 2 < found.cooled


@pytest.mark.usefixtures("own_clock", "computed")
def test_all_else_that_is_slow_makes_a_step_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*values: Any) -> Tensor:
        time.sleep(SLOW)
        return plain(*values)

    plain = stage.positions
    monkeypatch.setattr(stage, "positions", late)
    found = serving_passes(spec_of(4), torch.float32, ServingSizes((1,), prompt=20, chunk=16), seconds=0.3)
    assert min(found.turns[0].seconds, found.follows[0].seconds) > SLOW > found.cooled
