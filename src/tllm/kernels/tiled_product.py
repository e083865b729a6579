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
    exact: bool
    threads: int


choices = Autotuned[PackedProductKind]("product of few bits")


def kind_of(rows: int, outputs: int, weight: PackedWeightArguments, exact: bool) -> PackedProductKind:
    """Of `rows` rows for each weight, where all weights are like this one."""
    alike = min(next_power_of_two(rows), MANY_ROWS)
    return PackedProductKind(alike, outputs, weight.columns, weight.kind, weight.group, exact, torch.get_num_threads())


def multiply(kernels: Library, kind: PackedProductKind, product: Product) -> None:
    """Make a product in the way that is the faster. A single row is not measured: a tile has place for sixteen."""
    product(kernels.has_tiles and kind.rows > 1 and _tiles_are_faster(kind, product))


def _tiles_are_faster(kind: PackedProductKind, product: Product) -> bool:
    choice = choices.known.get(kind)
    if choice is None:
        ways = {"vectors": partial(product, False), "tiles": partial(product, True)}
        choice = choices.choose(kind, ways, partial(fastest, ways))
    return choice.name == "tiles"
