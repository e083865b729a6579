"""Reduce-scatter and all-gather, the two halves of an all-reduce, which ZeRO uses one by one.

With n ranks, S bytes, h machines of m ranks each; costs between machines are bytes that a machine sends:

    direct_reduce_scatter, direct_all_gather    1 round, each rank to every other       m (h - 1) / h S
    HierarchicalReduceScatter                   h rounds in each machine, 1 between     (h - 1) / h S, or twice
    HierarchicalAllGather                       1 round between, h in each machine      (h - 1) / h S

Hierarchical ones take the same place in every machine as the way out: rank p of a machine sends its machine's parts to
rank p of the others alone. Partial results travel, 16-bit floats as float32. Pieces may have any lengths. Sums have the
bits of the tree over all ranks (`fold.py`), of which a machine's ranks are a subtree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tllm.comm.collectives.fold import finish_reduction, fold, widened
from tllm.comm.collectives.group_links import GroupLinks

ReduceScatterAlgorithm = Callable[[Sequence[Tensor], Tensor, GroupLinks, str], None]
"""algorithm(pieces, mine, links, op): `mine`, this rank's own part of its piece, becomes all ranks' parts of it
combined. `pieces` has one entry for each rank."""

AllGatherAlgorithm = Callable[[Sequence[Tensor], GroupLinks], None]
"""algorithm(pieces, links): every rank gets every other's piece in its place, and has its own there."""


def direct_reduce_scatter(pieces: Sequence[Tensor], mine: Tensor, links: GroupLinks, op: str) -> None:
    """One round, in which a rank sends (n - 1) / n of its bytes."""
    parts = [
        mine if peer == links.rank else links.buffers.piece(peer, mine.shape, mine.dtype) for peer in range(links.size)
    ]
    links.exchange({peer: pieces[peer] for peer in links.send}, {peer: parts[peer] for peer in links.recv})
    fold(parts, mine, op)


def direct_all_gather(pieces: Sequence[Tensor], links: GroupLinks) -> None:
    """One round, a rank sends (n - 1) / n S bytes."""
    links.exchange(dict.fromkeys(links.send, pieces[links.rank]), {peer: pieces[peer] for peer in links.recv})


class HierarchicalReduceScatter:
    """In each machine first, for one machine's pieces after another, then between ranks of the same place."""

    def __init__(self, per_host: int) -> None:
        self.per_host = per_host

    def __call__(self, pieces: Sequence[Tensor], mine: Tensor, links: GroupLinks, op: str) -> None:
        here, alike = places(links, self.per_host)
        inside, partial_op, sums = links.among(here), "sum" if op == "mean" else op, list[Tensor]()
        wide = [widened(piece, op) for piece in pieces]
        for first in range(0, links.size, self.per_host):
            of_host = wide[first : first + self.per_host]
            sums.append(of_host[inside.rank].clone())
            direct_reduce_scatter(of_host, sums[-1], inside, partial_op)
        between = links.among(alike)
        total = sums[between.rank]
        direct_reduce_scatter(sums, total, between, partial_op)
        finish_reduction(total, mine, op, links.size)


class HierarchicalAllGather:
    """Between ranks of the same place first, then in each machine what came from one machine after another."""

    def __init__(self, per_host: int) -> None:
        self.per_host = per_host

    def __call__(self, pieces: Sequence[Tensor], links: GroupLinks) -> None:
        here, alike = places(links, self.per_host)
        direct_all_gather([pieces[rank] for rank in alike], links.among(alike))
        inside = links.among(here)
        for first in range(0, links.size, self.per_host):
            direct_all_gather(pieces[first : first + self.per_host], inside)


def places(links: GroupLinks, per_host: int) -> tuple[range, range]:
    """The ranks of this rank's machine, and those of the same place on all machines."""
    first, place = links.rank // per_host * per_host, links.rank % per_host
    return range(first, first + per_host), range(place, links.size, per_host)
