"""A clock for tests of what is measured."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.support.own_clock import OwnClock
from tllm.core.timing import mean_seconds_each
from tllm.engine.measure import device_layer_speed, layer_speed


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> OwnClock:
    """What all measure by."""
    clock = OwnClock()
    monkeypatch.setattr(time, "perf_counter", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    for module in (device_layer_speed, layer_speed):
        monkeypatch.setattr(module, "mean_seconds_each", partial(mean_seconds_each, clock=clock.now))
    return clock


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layers are played: those would not see what is made slow."""
    monkeypatch.setattr("tllm.engine.measure.benchmark_layers.decode_recordings", lambda *stage: None)
