"""`HeldMemory`: the memory of what a recording computes, which stays where it is until nobody plays that any more."""

from __future__ import annotations

import math
import weakref
from bisect import insort
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

ROUNDED_TO = 4096
"""Blocks are of so many bytes, or a multiple."""

Block = np.ndarray[tuple[int], np.dtype[np.uint8]]


class HeldMemory:
    """Tensors in blocks that are kept: one that is let go leaves its block to a later tensor, and never to others.

    So recordings that are made one after another use the same few blocks, as none of them is played beside another. A
    block has room for the most rows that a later recording may have; the system gives it no memory that nobody uses.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._free: list[tuple[int, int]] = []  # (bytes, number) of each block that no tensor has, by size

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(len(block) for block in self._blocks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, growth: Fraction = Fraction(1)) -> Tensor:
        """A tensor of whatever numbers, in a block in which `growth` times as large a one has room.

        The block is free again when the tensor and all its views are gone.
        """
        nbytes = max(1, math.prod(shape)) * dtype.itemsize
        number = self._block_of(math.ceil(nbytes * growth))
        bytes_here = self._blocks[number][:nbytes]  # an object of its own, which the tensor's storage keeps alive
        weakref.finalize(bytes_here, self._give_back, number)
        return torch.from_numpy(bytes_here).view(dtype)[: math.prod(shape)].view(tuple(shape))

    def place_of(self, x: Tensor) -> Tensor | None:
        """The memory that x has now, as a tensor that keeps no block from later ones; None if x has none of here, or
        lies apart."""
        for block in self._blocks if x.is_contiguous() else ():
            at = x.data_ptr() - block.ctypes.data
            if 0 <= at < len(block):
                return torch.from_numpy(block[at : at + x.nbytes]).view(x.dtype).view(x.shape)
        return None

    def _block_of(self, nbytes: int) -> int:
        """The smallest free block of so many bytes, or a new one."""
        free = next((free for free in self._free if free[0] >= nbytes), None)
        if free is not None:
            self._free.remove(free)  # not by its place, as others may be given back meanwhile
            return free[1]
        block: Block = torch.empty(-(-nbytes // ROUNDED_TO) * ROUNDED_TO, dtype=torch.uint8).numpy()
        self._blocks.append(block)
        return len(self._blocks) - 1

    def _give_back(self, number: int) -> None:
        insort(self._free, (len(self._blocks[number]), number))
