"""The ways to write a model's layers as sums: cuts into stages, whose order does not count."""

from __future__ import annotations

from collections.abc import Iterator


def even(layers: int, devices: int) -> Iterator[tuple[int, ...]]:
    """`layers` as sums of no more parts than devices, all of which are as equal as they can be."""
    for parts in range(1, min(layers, devices) + 1):
        yield tuple((layers + place) // parts for place in range(parts))


def uneven(layers: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All other ways to write `layers` as a sum of no more parts than devices."""
    for cut in _sums(layers, layers, min(layers, devices)):
        if cut[0] - cut[-1] > 1:
            yield cut


def ways(layers: int, parts: int) -> int:
    """How many ways there are to write `layers` as a sum of at most so many parts: as many as with no part above."""
    ways = [1] + [0] * layers
    for part in range(1, parts + 1):
        for whole in range(part, layers + 1):
            ways[whole] += ways[whole - part]
    return ways[layers]


def _sums(whole: int, largest: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Sums of at most so many parts, none above the largest, the largest first."""
    if not whole:
        yield ()
    elif parts:
        for part in range(min(whole, largest), -(-whole // parts) - 1, -1):
            for rest in _sums(whole - part, part, parts - 1):
                yield (part, *rest)
