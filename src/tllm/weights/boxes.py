"""Boxes of indices, one [start, stop) for each dim of a tensor: size, parts, and who covers what. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


def whole(shape: Shape) -> Box:
    """The box of everything."""
    return tuple((0, width) for width in shape)


def widths(box: Box) -> Shape:
    """The shape of what is in a box."""
    return tuple(stop - start for start, stop in box)


def is_inside(box: Box, shape: Shape) -> bool:
    """Whether a box has a tensor's dims and stays within them."""
    return len(box) == len(shape) and all(
        0 <= start <= stop <= width for (start, stop), width in zip(box, shape, strict=True)
    )


def show(box: Box) -> str:
    """How messages write a box: `[0:32, 128:256]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def overlap(a: Box, b: Box) -> Box | None:
    """Where two boxes of one tensor meet; None where they do not."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(box: Box, outer: Box) -> Box:
    """The same box, counted from the first corner of another that holds it."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def runs(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a tensor laid out row by row, as boxes in the order of its memory."""
    assert 0 <= start <= stop <= math.prod(shape)
    if start == stop:
        return
    if not shape:
        yield ()
        return
    row, rest = math.prod(shape[1:]), whole(shape[1:])
    (first, skipped), (last, over) = divmod(start, row), divmod(stop, row)
    if skipped:
        end = row if first < last else over
        yield from (((first, first + 1), *box) for box in runs(shape[1:], skipped, end))
        first += 1
    if first < last:
        yield ((first, last), *rest)
    if over and first <= last:
        yield from (((last, last + 1), *box) for box in runs(shape[1:], 0, over))


def chunks(box: Box, limit: int) -> Iterator[Box]:
    """The box in parts of at most `limit` elements, in the order of their memory."""
    size = math.prod(widths(box))
    if size == 0:
        return
    if size <= limit:
        yield box
        return
    dim = next(i for i, width in enumerate(widths(box)) if width > 1)
    start, stop = box[dim]
    step = max(1, limit // (size // (stop - start)))
    for at in range(start, stop, step):
        yield from chunks((*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :]), limit)


def regions(shape: Shape, boxes: Sequence[Box]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """The tensor's indices as boxes that are each held alike, with the numbers of the given boxes that hold them.

    A sweep along one dim after another, so its cost follows the number of different seams and not the square of the
    number of boxes.
    """
    if math.prod(shape) > 0:
        yield from _sweep(shape, boxes, 0, [i for i, box in enumerate(boxes) if math.prod(widths(box)) > 0])


def _sweep(shape: Shape, boxes: Sequence[Box], dim: int, held: list[int]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    if dim == len(shape) or not held:
        yield tuple((0, width) for width in shape[dim:]), tuple(held)
        return
    held = sorted(held, key=lambda i: boxes[i][dim])
    seams = sorted({0, shape[dim], *(at for i in held for at in boxes[i][dim])})
    waiting, active = 0, list[int]()
    for start, stop in itertools.pairwise(seams):
        active = [i for i in active if boxes[i][dim][1] > start]
        while waiting < len(held) and boxes[held[waiting]][dim][0] <= start:
            active.append(held[waiting])
            waiting += 1
        for box, holders in _sweep(shape, boxes, dim + 1, sorted(active)):
            yield ((start, stop), *box), holders
