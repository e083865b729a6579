"""`ring`: an all-reduce by neighbours only, n - 1 steps to sum and n - 1 to spread (Patarasuk and Yuan, 2009).

    ring   2 (n - 1) (L + S / (n B))     and 16-bit floats travel as float32 while they are summed

Every rank speaks to two others: a link that is slow between two ranks which are not neighbours costs nothing, and the
ranks of one machine, side by side, use its cable once. Piece p is added in the order p, p + 1, …, p - 1: the same bits
on all ranks, but not those of the tree that all other algorithms add by.
"""

from __future__ import annotations

import torch

from tllm.comm.algorithms import Ends, cut, exchange
from tllm.comm.fold import COMBINE, finish, widened


def ring(x: torch.Tensor, ends: Ends, op: str = "sum") -> None:
    """Replace contiguous `x` by all ranks' combined."""
    rank, size = ends.rank, ends.size
    to, source = ends.send[(rank + 1) % size], ends.recv[(rank - 1) % size]
    totals, pieces = cut(widened(x, op), size), cut(x, size)
    for step in range(size - 1):
        mine = totals[(rank - step - 1) % size]
        part = ends.scratch.piece((rank - 1) % size, mine.shape, mine.dtype)
        exchange([(to, totals[(rank - step) % size])], [(source, part)])
        COMBINE[op](part, mine, out=mine)
    own = (rank + 1) % size
    finish(totals[own], pieces[own], op, size)
    for step in range(size - 1):
        exchange([(to, pieces[(own - step) % size])], [(source, pieces[(own - step - 1) % size])])
