from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from tllm.training.measure import peak_flops as peak
from tllm.training.measure.peak_flops import SIZES, matrix_peak


class Clock:
    """Time that passes only in products, each taking work / rate, and more in every second one: the machine is busy."""

    def __init__(self, rate: float) -> None:
        self.now, self.rate, self.products = 0.0, rate, list[int]()

    def perf_counter(self) -> float:
        return self.now

    def mm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.products.append(len(a))
        self.now += 2 * len(a) ** 3 / self.rate * (1 + len(self.products) % 2)
        return out


@pytest.mark.parametrize("rate", [1e8, 3e9, 1e11, 5e12])
def test_the_best_rate_is_found_in_the_time_given(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(rate)
    monkeypatch.setattr(peak, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.mm)
    assert matrix_peak(torch.float32, 0.5) == pytest.approx(rate)
    longest = 2 * 2 * max(clock.products) ** 3 / rate
    assert clock.now <= 0.5 + 2 * longest, "at most a product to warm up and one begun in time come on top"
    if rate > 1e11:
        assert set(clock.products) == set(SIZES)


def test_a_real_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a computer of long ago and none that exists; by the time for which this thread has a processor."""
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=time.thread_time))
    assert 1e8 < matrix_peak(torch.float32, 0.05) < 1e15
