"""Products with packed weights by tiles (AMX) or by vectors, whichever is the faster on this machine: measured.

Both have the same bits. Tiles win where there are many rows to a weight's codes and lose where there are few; from how
many on differs with the format, the shape and what else computes on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import fastest, next_power_of_two
from tllm.kernels.library import Library, PackedWeightArguments

MANY_ROWS = 512
"""Products of so many rows and more are alike."""


Product = Callable[[bool], None]
"""Makes the product, by tiles or not."""


class PackedProductKind(NamedTuple):
    """Products that are alike: `rows` is the largest number of rows of a weight that counts as the same."""

    rows: int
    outputs: int
    columns: int
    codes: int
    group: int
    threads: int


choices = Autotuned[PackedProductKind]("product of few bits")


def multiply(kernels: Library, rows: int, outputs: int, weight: PackedWeightArguments, product: Product) -> None:
    """Make a product in the way that is the faster, of `rows` rows for each weight; all weights are like this one."""
    product(kernels.has_tiles and rows > 1 and _tiles_are_faster(rows, outputs, weight, product))


def _tiles_are_faster(rows: int, outputs: int, weight: PackedWeightArguments, product: Product) -> bool:
    alike = min(next_power_of_two(rows), MANY_ROWS)
    kind = PackedProductKind(alike, outputs, weight.columns, weight.kind, weight.group, torch.get_num_threads())
    choice = choices.known.get(kind)
    if choice is None:
        ways = {"vectors": partial(product, False), "tiles": partial(product, True)}
        choice = choices.choose(kind, ways, partial(fastest, ways))
    return choice.name == "tiles"
