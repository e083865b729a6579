"""`SharedSums`: sums of a group whose ranks are processes of one machine and share memory (csrc/shared_sum.c).

A sum over a link takes Python, system calls and a wake-up at both ends, all with cold caches after a product; this one
takes what the numbers take to go from one core to another. It is a kernel, so a recording has it among its calls.
"""

from __future__ import annotations

import ctypes
import time
from typing import Protocol

import torch
from torch import Tensor

from tllm.core.errors import LinkClosed
from tllm.kernels.library import DTYPE_NUMBERS, Library, SharedSumArguments

SUMMED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of numbers that can be summed so."""

ITEM_BYTES = {DTYPE_NUMBERS[dtype]: dtype.itemsize for dtype in SUMMED}
"""By the kernels' number of the dtype."""

SPIN_SECONDS = 0.0005
"""So long the others are waited for in a loop, which is most of what ranks that are in step ever wait."""


class RanksInMemory(Protocol):
    """The memory that ranks share: where it lies, and how the others are waited for (comm/links/shared_memory.py).

    `arrivals` and `places` are addresses; a place has `place_bytes`.
    """

    rank: int
    ranks: int
    arrivals: int
    places: int
    place_bytes: int

    def wait(self, number: int, piece: int) -> None:
        """Return when every other rank has come to this piece; LinkError where one does not."""


class SharedSums:
    """One rank's end. Every rank makes the same sums in the same order, each in one thread at a time."""

    def __init__(self, kernels: Library, memory: RanksInMemory) -> None:
        self._sum, self._memory = kernels.recorded.shared_sum, memory
        self._arguments = SharedSumArguments(
            *(memory.arrivals, memory.places, memory.rank, memory.ranks, memory.place_bytes),
            number=1,
            spin=round(SPIN_SECONDS * 1e9),
        )
        self.address = ctypes.addressof(self._arguments)
        self._waited = 0.0  # outside of the kernel

    @property
    def seconds(self) -> float:
        """That all sums took so far, with the time in which others were waited for."""
        return float(self._arguments.taken) / 1e9 + self._waited

    def takes(self, x: Tensor) -> bool:
        """Whether this is a tensor that can be summed here, by what is the same on every rank."""
        return x.is_cpu and x.dtype in SUMMED

    def check(self) -> None:
        """LinkClosed after a sum that was given up: its numbers lie where those of the next one would."""
        if self._arguments.has_come:
            rank, number = self._memory.rank, self._arguments.number
            raise LinkClosed(f"rank {rank} gave up piece {number} of a sum, and makes no more with these ranks")

    def __call__(self, x: Tensor) -> Tensor:
        """All ranks' `x` summed, in place, with the bits of `comm.collectives.fold`."""
        self.check()
        y = x.detach() if x.is_contiguous() else x.detach().contiguous()
        count, dtype = y.numel(), DTYPE_NUMBERS[y.dtype]
        while not self._sum(self.address, y.data_ptr(), count, dtype):
            self.wait(count, dtype)
        return x if x.is_contiguous() else x.copy_(y)

    def wait(self, count: int, dtype: int) -> None:
        """Return when the kernel, which gave up for now, can go on with the sum of `count` numbers of that kind."""
        began, arguments = time.perf_counter(), self._arguments
        here = min(count - arguments.summed, self._memory.place_bytes // ITEM_BYTES[dtype])
        self._memory.wait(arguments.number, here * 8 + dtype)
        self._waited += time.perf_counter() - began
