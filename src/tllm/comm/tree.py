"""A binary tree over ranks: `tree`, an all-reduce for many ranks, and its two halves, to one rank and from one.

The tree is that of `fold.py`, so the bits are those of `one_shot` and `two_step` whichever rank is the root: a subtree
of ranks [start, stop) is summed by its root if it holds that, else by its first rank. With d = ceil(log2 n):

    fold_up, spread_down   d (L + S / B)       and for 16-bit floats twice the bytes on the way up
    tree                   2 d (L + S / B)     with 2 d messages for a rank at most, where one_shot has 2 (n - 1)
"""

from __future__ import annotations

import torch

from tllm.comm.algorithms import Ends, exchange
from tllm.comm.fold import COMBINE, finish, full, widened

ROOT = 0


def tree(x: torch.Tensor, ends: Ends, op: str = "sum") -> None:
    """Replace contiguous `x` by all ranks' combined: up to one rank and down again."""
    fold_up(x, ends, op, ROOT)
    spread_down(x, ends, ROOT)


def fold_up(x: torch.Tensor, ends: Ends, op: str, root: int) -> None:
    """Contiguous `x` of `root` becomes all ranks' combined; that of the others is left in between."""
    total = widened(x, op)
    _up(total, ends, op, root, 0, ends.size)
    if ends.rank == root:
        finish(total, x, op, ends.size)


def spread_down(x: torch.Tensor, ends: Ends, root: int) -> None:
    """Contiguous `x` of everyone becomes that of `root`."""
    _down(x, ends, root, 0, ends.size)


def _up(x: torch.Tensor, ends: Ends, op: str, root: int, start: int, stop: int) -> None:
    """Combine ranks [start, stop), of which this is one."""
    if stop - start == 1:
        return
    middle = start + full(stop - start)
    _up(x, ends, op, root, *((start, middle) if ends.rank < middle else (middle, stop)))
    top, other = pair(root, start, middle, stop)
    if ends.rank == other:
        exchange([(ends.send[top], x)], [])
    elif ends.rank == top:
        part = ends.scratch.piece(other, x.shape, x.dtype)
        exchange([], [(ends.recv[other], part)])
        COMBINE[op](x, part, out=x)


def _down(x: torch.Tensor, ends: Ends, root: int, start: int, stop: int) -> None:
    """Pass on to ranks [start, stop), of which this is one, what the first of them in the tree has."""
    if stop - start == 1:
        return
    middle = start + full(stop - start)
    top, other = pair(root, start, middle, stop)
    if ends.rank == top:
        exchange([(ends.send[other], x)], [])
    elif ends.rank == other:
        exchange([], [(ends.recv[top], x)])
    _down(x, ends, root, *((start, middle) if ends.rank < middle else (middle, stop)))


def pair(root: int, start: int, middle: int, stop: int) -> tuple[int, int]:
    """Who holds what [start, stop) come to, and who the other half of it."""
    left = root if start <= root < middle else start
    right = root if middle <= root < stop else middle
    return (right, left) if right == root else (left, right)
