"""Seconds of one matrix product by the roofline model: computed or moved, whichever takes longer."""

from __future__ import annotations

from typing import NamedTuple

from tllm.planner.cluster.device import Device


class MatrixProduct(NamedTuple):
    """`copies` products [rows, inner] x [inner, columns]."""

    rows: float
    inner: int
    columns: int
    copies: float = 1

    @property
    def flops(self) -> float:
        return 2 * self.copies * self.rows * self.inner * self.columns

    @property
    def smallest(self) -> float:
        return min(self.rows, self.inner, self.columns)

    @property
    def elements(self) -> float:
        """Of both operands and the result."""
        return self.copies * (self.rows * (self.inner + self.columns) + self.inner * self.columns)

    def seconds(self, device: Device, dtype: str, item_bytes: int) -> float:
        """The longer of computing it in `dtype`, and of moving operands and result of so many bytes an element."""
        computed = self.flops / device.matrix_rate(dtype, self.smallest)
        return max(computed, item_bytes * self.elements / device.memory_bandwidth)
