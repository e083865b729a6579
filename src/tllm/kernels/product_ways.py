"""Products of our kernels in the way that is the fastest on this machine: measured. Those tried have the same bits.

Several rows are multiplied by tiles (AMX) or by vectors: tiles win where there are many rows to a weight's codes and
lose where there are few, and from how many on differs with the format, the shape and what else computes on the
processor. A single row reads the weight's outputs one after another or several side by side: some processors fetch more
from memory that way, and others less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeVar

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import BestTimes, next_power_of_two
from tllm.kernels.library import Library, PackedWeightArguments, kernel_threads

MANY_ROWS = 512
"""Products of so many rows and more are alike."""

TURNS = 4
"""Of each way to make products of a kind, before one is taken."""


class Way(IntEnum):
    """As csrc/quantized_matmul.c and csrc/float_matmul.c number them."""

    ONE_BY_ONE = 0
    BY_TILES = 1
    SIDE_BY_SIDE = 2
    BY_PAIRS = 3


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


class Trials(BestTimes):
    """What products of one kind took so far, in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0


Kind = TypeVar("Kind", bound=NamedTuple)

_TRYING = threading.RLock()
"""Ranks that are threads of one process try one after another."""

trials_made = 0
"""Of all kinds so far: whoever records products compares it before and after, as a trial may be in the slower way."""


class ProductWays(Autotuned[Kind]):
    """Choices that are found on the products themselves: the first ones of a kind are made in each way by turns.

    Products are of other layers mostly. The same weight again would come from a cache, and what matters is memory. And
    turns that are far apart do not all meet a moment in which a core is slower, or busy with something else.
    """

    def __init__(self, area: str) -> None:
        super().__init__(area)
        self._trials: dict[Kind, Trials] = {}

    def make(self, kind: Kind, ways: Mapping[str, Way], product: Product) -> None:
        """Make a product in the way that is the fastest, or in the next one that is tried."""
        choice = self.known.get(kind)
        if choice is None:
            with _TRYING:
                choice = self.known.get(kind) if kind in self._trials else self.kept(kind, ways)
                if choice is None:
                    self._try(kind, ways, product)
                    return
        product(ways[choice.name])

    def _try(self, kind: Kind, ways: Mapping[str, Way], product: Product) -> None:
        global trials_made
        trials = self._trials.setdefault(kind, Trials())
        name = list(ways)[trials.turns % len(ways)]
        trials.turns += 1
        trials_made += 1
        trials.run(name, partial(product, ways[name]))
        if trials.turns == TURNS * len(ways):
            self.put(kind, trials.fastest())
            del self._trials[kind]


packed = ProductWays[PackedProductKind]("product of few bits")


def kind_of(rows: int, outputs: int, weight: PackedWeightArguments, exact: bool) -> PackedProductKind:
    """Of `rows` rows for each weight, where all weights are like this one."""
    alike = min(next_power_of_two(rows), MANY_ROWS)
    return PackedProductKind(alike, outputs, weight.columns, weight.kind, weight.group, exact, kernel_threads())


def multiply_packed(kernels: Library, kind: PackedProductKind, product: Product) -> None:
    """Make a product with a packed weight, of several rows without tiles in the only way there is."""
    if kind.rows > 1 and not kernels.has_tiles:
        product(Way.ONE_BY_ONE)
    else:
        packed.make(kind, ROW_WAYS if kind.rows == 1 else MANY_ROWS_WAYS, product)
