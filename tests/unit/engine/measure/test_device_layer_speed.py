"""What is worked out of whole steps: held to a stage whose layers and whose rest take as long as the test says."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.devices.choose import CPU
from tllm.engine import stage
from tllm.engine.measure.device_layer_speed import device_serving_passes, num_measured_layers
from tllm.engine.measure.layer_speed import ServingSizes
from tllm.model.layer import Layer
from tllm.spec.request import Output

SIZES = ServingSizes((1, 3), prompt=20, chunk=16)
LAYER, STEP = 0.01, 0.03


@pytest.mark.usefixtures("own_clock")
def test_layers_and_what_a_step_takes_beside_them_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_layer(self: Layer, *values: Any) -> Tensor:
        time.sleep(LAYER)
        return layer(self, *values)

    def slow_step(*values: Any) -> Tensor:
        time.sleep(STEP)
        return positions(*values)

    layer, positions, given = Layer.forward, stage.positions, list[Output]()
    monkeypatch.setattr(Layer, "forward", slow_layer)
    monkeypatch.setattr(stage, "positions", slow_step)
    monkeypatch.setattr("tllm.engine.assembly.decode_recordings", lambda *stage: None)  # those see no slow step
    monkeypatch.setattr("tllm.engine.measure.device_layer_speed.MOST_LAYERS", 3)
    spec = spec_of(2)  # of which the first one comes again
    sizes = SIZES._replace(sequences=(3,))
    found = device_serving_passes(spec, torch.float32, sizes, CPU, 2**32, 0.1, given.extend)
    assert [(one.rows, one.ranks, one.keys) for one in found.layers] == [
        (rows, ranks, keys) for ranks in (1, 2) for rows, keys in ((3, 20), (16, 0))
    ]
    assert all(LAYER / 2 < one.seconds < 2 * LAYER for one in found.layers)
    assert [one.rows for one in found.logits] == [one.rows for one in found.turns] == [3]
    assert all(STEP - LAYER < one.seconds < 2 * STEP for one in (*found.turns, *found.follows))
    assert found.rest < LAYER and given, "tokens are handed out"
    assert found.unplayed < LAYER / 2


@pytest.mark.usefixtures("own_clock")
def test_a_layer_that_is_played_elsewhere_takes_longer_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_layer(self: Layer, *values: Any) -> Tensor:
        time.sleep(LAYER)
        return layer(self, *values)

    layer = Layer.forward
    monkeypatch.setattr(Layer, "forward", slow_layer)
    sizes = SIZES._replace(sequences=(3,))
    found = device_serving_passes(spec_of(4), torch.float32, sizes, CPU, 2**32, 0.1)
    assert LAYER / 2 < found.unplayed < 2 * LAYER


def test_as_many_layers_are_measured_as_have_room() -> None:
    found = [num_measured_layers(spec_of(3), torch.float32, SIZES, 2**bits) for bits in range(20, 37)]
    assert found == sorted(found) and (found[0], found[-1]) == (2, 16) and any(2 < one < 16 for one in found)
