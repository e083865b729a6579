"""A device's memory is what the device says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.device.separate_device import SEPARATE
from tllm.core.errors import CapacityError, ConfigError
from tllm.devices.memory import (
    completed,
    device_name,
    forget_peak,
    free_memory,
    held_memory,
    peak_memory,
    usable_device_memory,
)
from tllm.node.machine.memory_limit import out_of_memory

CUDA = torch.device("cuda", 1)
GIB = 2**30


def test_a_peak_counts_what_tensors_held_and_can_be_forgotten() -> None:
    device = SEPARATE[0]
    before = held_memory(device)
    x = torch.empty(GIB // 1024, dtype=torch.uint8, device=device)
    assert held_memory(device) - before >= x.nbytes
    del x
    assert peak_memory(device) - before >= GIB // 1024
    forget_peak(device)
    assert peak_memory(device) == held_memory(device)


def test_given_memory_is_a_part_of_the_device_and_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: set_to.append(args))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert device_name(CUDA) == "cuda:1 Some GPU" and free_memory(CUDA) == 3 * GIB
    assert usable_device_memory(CUDA, None) == 8 * GIB and not set_to
    assert usable_device_memory(CUDA, 2 * GIB) == 2 * GIB and set_to == [(0.25, CUDA)]
    with pytest.raises(ConfigError, match=r"9.00 GiB of memory were given and cuda:1 has 8.00 GiB"):
        usable_device_memory(CUDA, 9 * GIB)
    with pytest.raises(ConfigError, match="before any weight"):
        usable_device_memory(CUDA, 1000)


def test_what_is_timed_waits_for_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[Any]()
    monkeypatch.setattr(torch.get_device_module(SEPARATE[1]), "synchronize", done.append)
    completed(lambda: done.append("told"), SEPARATE[1])()
    assert done == ["told", SEPARATE[1]], "another device may be the current one"


def test_a_device_that_is_full_is_told_in_its_own_words() -> None:
    error = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), None)
    assert isinstance(error, CapacityError)
    assert error.message == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
