"""The global order of rows: the row at position 0, 1, 2, … of an endless run, computed without a list.

Everything here is a function of the position alone, so a run can go on from a position, and any number of ranks agree.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from tllm.core.errors import ConfigError, counted
from tllm.training.data.seeds import key_for

ROUNDS = 6
MASK = (1 << 64) - 1
PERIOD = 1 << 12
"""Slots of the longest mixing period: a file's part of a mixture is held to one in so many."""


class RowOrder(Protocol):
    """`rows` is how many different rows there are, numbered file after file."""

    rows: int

    def row(self, position: int) -> int: ...


class Permutation:
    """A shuffle of range(size) in no memory: a Feistel network over the numbers, walked until it lands inside.

    M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988, and
    J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", 2002 (cycle walking).
    """

    def __init__(self, size: int, key: int) -> None:
        assert size > 0
        self.size = size
        self._half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [_mixed((key + number) & MASK) for number in range(ROUNDS)]

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        value = self._once(index)
        while value >= self.size:  # the network permutes at most 4 times as many numbers: four turns on average
            value = self._once(value)
        return value

    def _once(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return left << self._half | right


class EachOnce:
    """All rows once an epoch: as they stand, or in an order of each epoch's own."""

    def __init__(self, rows: int, seed: int, shuffle: bool, name: str = "all") -> None:
        self.rows = rows
        self._seed, self._shuffle, self._name = seed, shuffle, name

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.rows)
        return _shuffled(self.rows, key_for("epoch", self._name, self._seed, epoch))[place] if self._shuffle else place


class Mixed:
    """Files in proportion to their weights; each goes through its own rows once before any of them comes again.

    The proportion is of rows, and exact over each period (7:3 has a period of ten rows).
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self.rows = sum(counts)
        self._seed = seed
        self._files = [EachOnce(count, seed, shuffle, f"file {number}") for number, count in enumerate(counts)]
        self._first_rows = [0, *accumulate(counts)]
        self._slots = _slots(weights)
        self._period = lru_cache(maxsize=4)(self._period_of)

    def row(self, position: int) -> int:
        period, place = divmod(position, sum(self._slots))
        file, taken = self._period(period)[place]
        return self._first_rows[file] + self._files[file].row(period * self._slots[file] + taken)

    def _period_of(self, period: int) -> list[tuple[int, int]]:
        """For each place of a period its file, and how many rows that file has given in it before."""
        firsts = [0, *accumulate(self._slots)]
        shuffled = _shuffled(firsts[-1], key_for("period", self._seed, period))
        taken = [0] * len(self._slots)
        places = []
        for place in range(firsts[-1]):
            file = bisect_right(firsts, shuffled[place]) - 1
            places.append((file, taken[file]))
            taken[file] += 1
        return places


def order_of(counts: Sequence[int], weights: Sequence[float] | None, seed: int, shuffle: bool) -> RowOrder:
    """The order of files with `counts` rows; without weights every row comes once an epoch."""
    if weights is None:
        return EachOnce(sum(counts), seed, shuffle)
    if len(weights) != len(counts):
        raise ConfigError(
            f"{counted(len(weights), 'weight is', 'weights are')} given for {counted(len(counts), 'file')}",
            "give one weight for each file",
        )
    return Mixed(counts, weights, seed, shuffle)


@lru_cache(maxsize=64)
def _shuffled(size: int, key: int) -> Permutation:
    return Permutation(size, key)


def _mixed(value: int) -> int:
    """The finish of splitmix64 (G. Steele and others, "Fast splittable pseudorandom number generators", 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def _slots(weights: Sequence[float]) -> list[int]:
    """Slots of one period for each file: exact where a period of at most `PERIOD` can be, else the nearest."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"a weight of {weight} cannot be mixed", "give each file a weight above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*whole)
    whole = [count // divisor for count in whole]
    if sum(whole) <= PERIOD:
        return whole
    return [max(1, round(fraction * PERIOD / sum(exact))) for fraction in exact]
