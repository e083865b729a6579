"""Products with packed weights in the way that is the fastest on this machine: measured. All have the same bits.

Several rows are multiplied by tiles (AMX) or by vectors: tiles win where there are many rows to a weight's codes and
lose where there are few, and from how many on differs with the format, the shape and what else computes on the
processor. A single row reads the weight's blocks of outputs one after another or several side by side: some processors
fetch more from memory that way, and others less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import BestTimes, next_power_of_two
from tllm.kernels.library import Library, PackedWeightArguments

MANY_ROWS = 512
"""Products of so many rows and more are alike."""

TURNS = 4
"""Of each way to make products of a kind, before one is taken."""


class Way(IntEnum):
    """As csrc/quantized_matmul.c numbers them."""

    ONE_BY_ONE = 0
    BY_TILES = 1
    SIDE_BY_SIDE = 2


ROW_WAYS = {"one by one": Way.ONE_BY_ONE, "side by side": Way.SIDE_BY_SIDE}
MANY_ROWS_WAYS = {"vectors": Way.ONE_BY_ONE, "tiles": Way.BY_TILES}

Product = Callable[[Way], None]
"""Makes the product in a way."""


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


class Trials(BestTimes):
    """What products of one kind took so far, in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0


_trials: dict[PackedProductKind, Trials] = {}
_TRYING = threading.Lock()
"""Ranks that are threads of one process try one after another."""

trials_made = 0
"""Of all kinds so far: whoever records products compares it before and after, as a trial may be in the slower way."""


def kind_of(rows: int, outputs: int, weight: PackedWeightArguments, exact: bool) -> PackedProductKind:
    """Of `rows` rows for each weight, where all weights are like this one."""
    alike = min(next_power_of_two(rows), MANY_ROWS)
    return PackedProductKind(alike, outputs, weight.columns, weight.kind, weight.group, exact, torch.get_num_threads())


def multiply(kernels: Library, kind: PackedProductKind, product: Product) -> None:
    """Make a product in the way that is the fastest; each of the first ones of a kind in another way."""
    if kind.rows > 1 and not kernels.has_tiles:
        product(Way.ONE_BY_ONE)
        return
    ways, choice = ROW_WAYS if kind.rows == 1 else MANY_ROWS_WAYS, choices.known.get(kind)
    if choice is None:
        with _TRYING:
            choice = choices.known.get(kind) if kind in _trials else choices.kept(kind, ways)
            if choice is None:
                _try(kind, ways, product)
                return
    product(ways[choice.name])


def _try(kind: PackedProductKind, ways: Mapping[str, Way], product: Product) -> None:
    """Make a product in the next of the ways, timed; after the last turn the faster one is chosen.

    Products are of other layers mostly. The same weight again would come from a cache, and what matters is memory. And
    turns that are far apart do not all meet a moment in which a core is slower, or busy with something else.
    """
    global trials_made
    trials = _trials.setdefault(kind, Trials())
    name = list(ways)[trials.turns % len(ways)]
    trials.turns += 1
    trials_made += 1
    trials.run(name, partial(product, ways[name]))
    if trials.turns == TURNS * len(ways):
        choices.put(kind, trials.fastest())
        del _trials[kind]
