"""What a record says of memory is of the plan that it was measured under."""

from __future__ import annotations

import sys

import pytest
import torch

from tllm.core.memory import give_back_memory
from tllm.devices.choose import CPU
from tllm.devices.memory import forget_peak, peak_memory

HELD = 256 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot forget a peak")
def test_a_peak_counts_from_where_it_was_forgotten() -> None:
    before = peak_memory(CPU)
    tensor = torch.ones(HELD // 4)
    high = peak_memory(CPU)
    assert high >= before, "a peak never falls by itself"
    del tensor
    assert peak_memory(CPU) == pytest.approx(high, rel=0.02), "Linux adds pages up in batches"
    give_back_memory()
    forget_peak(CPU)
    low = peak_memory(CPU)
    assert low < high - HELD // 2
    again = torch.ones(HELD // 8)
    assert peak_memory(CPU) > low + HELD // 4, "and rises again"
    del again
