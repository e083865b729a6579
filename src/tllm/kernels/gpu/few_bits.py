"""Products with weights of few bits on a GPU, with the bits of the processors' kernels.

x is rounded to 8 bits by groups of 32 first. Products of codes are added up as whole numbers; scales are applied in the
order of csrc/quantized_matmul.c, each operation rounded once: nothing is fused (`enable_fp_fusion`). The weights lie as
those of a processor (`quantization/packed_layout.py`).

All ways to make a product have the same bits, so that the one which is fastest is taken, by measuring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.kernels.fastest import next_power_of_two
from tllm.kernels.gpu.few_bits_rows import DeviceRows, round_rows
from tllm.kernels.gpu.few_bits_tiles import TileShape, multiply_by_tiles
from tllm.kernels.gpu.few_bits_weight import DeviceWeight
from tllm.kernels.gpu.few_bits_words import multiply_by_words
from tllm.kernels.gpu.products import known_fastest

__all__ = ["CANDIDATES", "DeviceRows", "DeviceWeight", "FewBitsKind", "multiply", "round_rows"]

Multiply = Callable[[DeviceRows, DeviceWeight, tuple[int, int], Tensor, int], None]

CANDIDATES: dict[str, Multiply] = {
    "64 groups of words": functools.partial(multiply_by_words, groups=64, warps=4),
    "32 groups of words": functools.partial(multiply_by_words, groups=32, warps=4),
    "32 groups of words, 2 warps": functools.partial(multiply_by_words, groups=32, warps=2),
    "tiles of 64 x 16": functools.partial(multiply_by_tiles, shape=TileShape(64, 1, 1)),
    "tiles of 64 x 32": functools.partial(multiply_by_tiles, shape=TileShape(64, 2, 4)),
    "tiles of 128 x 64": functools.partial(multiply_by_tiles, shape=TileShape(128, 4, 4)),
    "tiles of 256 x 32": functools.partial(multiply_by_tiles, shape=TileShape(256, 2, 4)),
}

BY_ROWS: dict[int, Sequence[str]] = {
    8: ("64 groups of words", "32 groups of words", "32 groups of words, 2 warps", "tiles of 64 x 16"),
    16: ("tiles of 64 x 16", "tiles of 64 x 32", "32 groups of words"),
    64: ("tiles of 64 x 16", "tiles of 64 x 32"),
    256: ("tiles of 256 x 32", "tiles of 128 x 64", "tiles of 64 x 16"),
}
"""What is measured for so many rows at the most, and for more than the last as for the last; the first of them is taken
where nothing can be measured."""

MEASURED_WEIGHTS = 2**20
"""Products with fewer weights take about as long as starting them does: the first candidate is taken."""


class FewBitsKind(NamedTuple):
    """Products that are alike: `rows` is the largest number of rows that counts as the same."""

    rows: int
    outputs: int
    groups: int
    bits: int
    group: int
    forms: tuple[tuple[str, bool], ...]
    exact: bool
    device: torch.device


_known: dict[FewBitsKind, str] = {}
"""What was found to be fastest, in this process."""


def multiply(x: DeviceRows, w: DeviceWeight, first: int, last: int, y_NF: Tensor, at: int) -> None:
    """Write the product of rows [first, last) of x to these of y, from column `at` on.

    In float64, if y is, as sums of multiples of 2^-30.
    """
    if first == last or w.outputs == 0:
        return
    rows = last - first
    names = BY_ROWS[next((most for most in BY_ROWS if rows <= most), max(BY_ROWS))]
    name = names[0]
    if w.is_float8:
        name = "tiles of 64 x 16"
    elif y_NF.is_cuda and w.outputs * x.groups * 32 >= MEASURED_WEIGHTS:
        alike = min(next_power_of_two(rows), max(BY_ROWS))
        forms, exact = tuple(w.forms().items()), y_NF.dtype == torch.float64
        kind = FewBitsKind(alike, w.outputs, x.groups, w.bits, w.group, forms, exact, y_NF.device)
        name = known_fastest(_known, kind, names, lambda name: CANDIDATES[name](x, w, (first, last), y_NF, at))
    CANDIDATES[name](x, w, (first, last), y_NF, at)
