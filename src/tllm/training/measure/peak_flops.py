"""The peak rate of a device's matrix products, against which a model's rate is held as MFU."""

from __future__ import annotations

import time
from functools import cache

import torch

from tllm.devices.choose import CPU
from tllm.devices.memory import wait_for

SIZES = (256, 512, 1024, 2048)
"""Widths of the square matrices: the best lies among them, or within a few parts in a hundred of what they reach."""

DEVICE_SIZES = (*SIZES, 4096, 8192, 16384)
"""Of a device with more units than a processor has, which smaller ones leave without work."""


def matrix_peak(dtype: torch.dtype, seconds: float = 0.5, device: torch.device = CPU) -> float:
    """Floating-point operations per second of the best product found in about `seconds`, on this process's threads
    or its `device`.

    The best and not the mean: what else runs on the machine can only slow a product down. A width is tried when what is
    left of the time has room for two products of it, so that a machine without units for a dtype answers as soon.
    """
    sizes = SIZES if device == CPU else DEVICE_SIZES
    best, until = 0.0, time.perf_counter() + seconds
    for tried, size in enumerate(sizes):
        left = until - time.perf_counter()
        if best and 2 * 2 * size**3 / best > left:
            break
        best = max(best, _rate(size, dtype, left / (len(sizes) - tried), device))
    return best


@cache
def known_peak(dtype: torch.dtype, seconds: float, device: torch.device) -> float:
    """The same, measured once by a process: a rank that goes on after a loss need not wait for it again."""
    return matrix_peak(dtype, seconds, device)


def _rate(size: int, dtype: torch.dtype, seconds: float, device: torch.device) -> float:
    """The best of the products that `seconds` hold, at least one, after one that warms up."""
    a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    torch.mm(a, b, out=out)
    wait_for(device)
    begun, until = time.perf_counter(), time.perf_counter() + seconds
    shortest = float("inf")
    while shortest == float("inf") or begun < until:
        torch.mm(a, b, out=out)
        wait_for(device)
        ended = time.perf_counter()
        shortest, begun = min(shortest, ended - begun), ended
    return 2 * size**3 / shortest
