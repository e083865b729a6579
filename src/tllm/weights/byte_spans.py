"""Which bytes of a file hold a part of a tensor: `Spans`, runs of equal width at equal distance. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tllm.weights.boxes import Box, Shape


@dataclass(frozen=True, slots=True)
class Spans:
    """`count` runs of `width` bytes, the first at byte `start`, each `pitch` bytes after the one before."""

    start: int
    width: int
    pitch: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.width * self.count

    @property
    def stop(self) -> int:
        """One past the last byte of the last run."""
        return self.start + (self.count - 1) * self.pitch + self.width


def one_span(start: int, stop: int) -> Spans:
    """Bytes [start, stop) as a single run."""
    return Spans(start, stop - start, stop - start, 1)


def spans_of(shape: Shape, box: Box, itemsize: int, base: int) -> Iterator[Spans]:
    """The bytes of a box of a tensor that is laid out row by row from byte `base`, in the order of its elements.

    A range of rows is one run, a cut of columns one run a row; a cut in three dims gives a `Spans` an outer index.
    """
    dims = _merged(shape, box)
    if any(start == stop for _, start, stop in dims):
        return
    width, first, last = dims[-1]
    run, pitch = (last - first) * itemsize, width * itemsize
    if len(dims) == 1:
        yield one_span(base + first * itemsize, base + last * itemsize)
        return
    middle, low, high = dims[-2]
    strides = [middle * pitch]
    for extent, _, _ in reversed(dims[1:-2]):
        strides.insert(0, strides[0] * extent)
    for outer in itertools.product(*(range(start, stop) for _, start, stop in dims[:-2])):
        at = sum(i * stride for i, stride in zip(outer, strides[-len(outer) :] if outer else [], strict=True))
        yield Spans(base + at + low * pitch + first * itemsize, run, pitch, high - low)


def _merged(shape: Shape, box: Box) -> list[tuple[int, int, int]]:
    """(width, start, stop) of each dim, where a dim that is taken whole is merged into the dim before it."""
    dims: list[tuple[int, int, int]] = [(1, 0, 1)]
    for width, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
        right, low, high = dims[0]
        if (low, high) == (0, right):
            dims[0] = (width * right, start * right, stop * right)
        else:
            dims.insert(0, (width, start, stop))
    return dims
