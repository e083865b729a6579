"""A clock for tests of what is measured."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tllm.core.timing import mean_seconds_each
from tllm.engine.measure import device_layer_speed, layer_speed

LOOK = 2e-3
"""Seconds that a look at the clock takes, so that what is repeated for some time comes to an end."""


class OwnClock:
    """Moved by looks at it and by sleeps, which take no time: how long something takes is what the test says."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self.sleep(LOOK)
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> OwnClock:
    """What all measure by."""
    clock = OwnClock()
    monkeypatch.setattr(time, "perf_counter", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    for module in (device_layer_speed, layer_speed):
        monkeypatch.setattr(module, "mean_seconds_each", partial(mean_seconds_each, clock=clock.now))
    return clock
