"""When gradients can be summed: in buckets, from the last parameter to the first, as `train.flat` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Filled(NamedTuple):
    """A bucket: its part of all gradients, and of the last backward pass what is done when it is full."""

    part: float
    done: float


def filled(sizes: Sequence[int], limit: int) -> list[Filled]:
    """Buckets of about `limit` of what `sizes` count, a parameter each; a pass takes time in proportion to them."""
    whole, before, now = sum(sizes), 0, 0
    found = []
    for size in reversed(sizes):
        now += size
        if now - before >= limit:
            found.append(Filled((now - before) / whole, now / whole))
            before = now
    return found + ([Filled((now - before) / whole, 1.0)] if now > before else [])


def outlast(buckets: Sequence[Filled], sums: float, backward: float) -> float:
    """Seconds by which the sums of all buckets, one after the other, end later than the pass that fills them."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.done * backward) + bucket.part * sums
    return max(0.0, end - backward)
