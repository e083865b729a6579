"""Products with packed weights in the way that is the fastest on this machine: measured. All have the same bits.

Several rows are multiplied by tiles (AMX) or by vectors: tiles win where there are many rows to a weight's codes and
lose where there are few, and from how many on differs with the format, the shape and what else computes on the
processor. A single row reads the weight's blocks of outputs one after another or several side by side: some processors
fetch more from memory that way, and others less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import BestTimes, fastest, next_power_of_two
from tllm.kernels.library import Library, PackedWeightArguments

MANY_ROWS = 512
"""Products of so many rows and more are alike."""

TURNS = 4
"""Of each way to multiply a single row, before one is taken."""


class Way(IntEnum):
    """As csrc/quantized_matmul.c numbers them."""

    ONE_BY_ONE = 0
    BY_TILES = 1
    SIDE_BY_SIDE = 2


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


class RowTrials(BestTimes):
    """What single rows of one kind took so far, in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0


_trials: dict[PackedProductKind, RowTrials] = {}
_TRYING = threading.Lock()
"""Ranks that are threads of one process try one after another."""

trials_made = 0
"""Of all kinds so far: whoever records products compares it before and after, as a trial may be in the slower way."""


def kind_of(rows: int, outputs: int, weight: PackedWeightArguments, exact: bool) -> PackedProductKind:
    """Of `rows` rows for each weight, where all weights are like this one."""
    alike = min(next_power_of_two(rows), MANY_ROWS)
    return PackedProductKind(alike, outputs, weight.columns, weight.kind, weight.group, exact, torch.get_num_threads())


def multiply(kernels: Library, kind: PackedProductKind, product: Product) -> None:
    """Make a product in the way that is the fastest."""
    if kind.rows == 1:
        _multiply_row(kind, product)
    elif kernels.has_tiles:
        product(_way_of_rows(kind, product))
    else:
        product(Way.ONE_BY_ONE)


def _way_of_rows(kind: PackedProductKind, product: Product) -> Way:
    choice = choices.known.get(kind)
    if choice is None:
        ways = {"vectors": partial(product, Way.ONE_BY_ONE), "tiles": partial(product, Way.BY_TILES)}
        choice = choices.choose(kind, ways, partial(fastest, ways))
    return Way.BY_TILES if choice.name == "tiles" else Way.ONE_BY_ONE


ROW_WAYS = {"one by one": Way.ONE_BY_ONE, "side by side": Way.SIDE_BY_SIDE}


def _multiply_row(kind: PackedProductKind, product: Product) -> None:
    """Make the product of a single row, each of the first ones in another way."""
    choice = choices.known.get(kind)
    if choice is None:
        with _TRYING:
            choice = choices.known.get(kind) if kind in _trials else choices.kept(kind, ROW_WAYS)
            if choice is None:
                _try(kind, product)
                return
    product(ROW_WAYS[choice.name])


def _try(kind: PackedProductKind, product: Product) -> None:
    """Make a product in the next of the ways, timed; after the last turn the faster one is chosen.

    Products are of other layers mostly. The same weight again would come from a cache, and what matters is memory.
    """
    global trials_made
    trials = _trials.setdefault(kind, RowTrials())
    name = list(ROW_WAYS)[trials.turns % len(ROW_WAYS)]
    trials.turns += 1
    trials_made += 1
    trials.run(name, partial(product, ROW_WAYS[name]))
    if trials.turns == TURNS * len(ROW_WAYS):
        choices.put(kind, trials.fastest())
        del _trials[kind]
