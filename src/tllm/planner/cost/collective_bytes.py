"""Bytes that one rank of n sends in each collective of `comm`, whose counts these are, to the byte."""

from __future__ import annotations

import math

LATENCY_BYTES = 64 * 1024


def one_shot_limit(ranks: int, latency_bytes: float = LATENCY_BYTES) -> float:
    """Bytes of a sum up to which every rank sends all it has to every other; above, each sums one piece."""
    return math.inf if ranks <= 2 else latency_bytes / ((ranks - 1) * (1 - 2 / ranks))


def all_reduce(elements: int, item: int, rank: int, ranks: int) -> int:
    """One sum: (n - 1) S, or of long messages 2 (n - 1) / n S."""
    if elements * item <= one_shot_limit(ranks):
        return (ranks - 1) * elements * item
    mine = elements * (rank + 1) // ranks - elements * rank // ranks
    return (elements - mine + (ranks - 1) * mine) * item


def all_gather(mine: int, ranks: int) -> int:
    """This rank's bytes to every other."""
    return (ranks - 1) * mine


def reduce_scatter(whole: int, mine: int) -> int:
    """To each other rank its part of what is here."""
    return whole - mine
