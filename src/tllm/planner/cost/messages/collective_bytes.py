"""Bytes that one rank of n sends in each collective; `comm` sends exactly as many."""

from __future__ import annotations

import math

LATENCY_BYTES = 64 * 1024
"""Bytes that a link could carry while one message is on its way (latency x bandwidth), about."""


def one_shot_limit(ranks: int, latency_bytes: float = LATENCY_BYTES) -> float:
    """Bytes of an all-reduce up to which every rank sends all it has to every other; longer ones are a reduce-scatter
    and an all-gather."""
    return math.inf if ranks <= 2 else latency_bytes / ((ranks - 1) * (1 - 2 / ranks))


def all_reduce(elements: int, item: int, rank: int, ranks: int) -> int:
    """An all-reduce of S bytes: (n - 1) S, or of long messages 2 (n - 1) / n S."""
    if elements * item <= one_shot_limit(ranks):
        return (ranks - 1) * elements * item
    mine = elements * (rank + 1) // ranks - elements * rank // ranks
    return (elements - mine + (ranks - 1) * mine) * item


def all_gather(mine: int, ranks: int) -> int:
    """An all-gather: `mine` bytes of this rank to every other."""
    return (ranks - 1) * mine


def reduce_scatter(whole: int, mine: int) -> int:
    """A reduce-scatter of `whole` bytes, of which this rank keeps `mine`: to each other rank its part."""
    return whole - mine
