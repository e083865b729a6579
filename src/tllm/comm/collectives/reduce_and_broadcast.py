"""Algorithms with a root: reduce to one rank, broadcast from one rank.

Notation, here and in `all_reduce.py`: n ranks, S bytes of the message, L seconds of latency of a link, B bytes/s that a
rank sends at, d = ceil(log2 n). Costs are seconds; `message_rounds.py` has the same as messages, round by round.

    direct_reduce                   L + (n - 1) S / B               1 round
    tree_reduce                     d (L + S / B)                   d rounds
    direct_broadcast                L + (n - 1) S / B               1 round
    tree_broadcast                  d (L + S / B)                   d rounds
    scatter_all_gather_broadcast    2 L + 2 (n - 1) / n S / B       2 rounds

Reductions combine the ranks in the order of the balanced binary tree of `fold.py`, so both have the same bits. In
`tree_reduce` 16-bit floats travel as float32, which doubles the bytes. Thakur, Rabenseifner and Gropp ("Optimization of
collective communication operations in MPICH", 2005) compare the tree, which they call binomial, with van de Geijn's
scatter followed by an all-gather; here scatter and all-gather are direct, with one message for each pair of ranks.
"""

from __future__ import annotations

import torch

from tllm.comm.collectives.fold import COMBINE, finish_reduction, fold, left_subtree_size, widened
from tllm.comm.collectives.group_links import GroupLinks, equal_pieces


def direct_reduce(x: torch.Tensor, links: GroupLinks, op: str, root: int) -> None:
    """The root's `x` becomes all ranks' combined; every other rank sends the root all its `x`."""
    if links.rank != root:
        links.exchange({root: x}, {})
        return
    pieces = [x if peer == root else links.buffers.piece(peer, x.shape, x.dtype) for peer in range(links.size)]
    links.exchange({}, {peer: pieces[peer] for peer in links.recv})
    fold(pieces, x, op)


def tree_reduce(x: torch.Tensor, links: GroupLinks, op: str, root: int) -> None:
    """The root's contiguous `x` becomes all ranks' combined; the others' is left with a partial result.

    The ranks [start, stop) of a subtree are combined by the root if it is among them, else by `start`.
    """
    total = widened(x, op)
    _reduce_subtree(total, links, op, root, 0, links.size)
    if links.rank == root:
        finish_reduction(total, x, op, links.size)


def direct_broadcast(x: torch.Tensor, links: GroupLinks, root: int) -> None:
    """Everyone's `x` becomes the root's, which sends it to each other rank."""
    if links.rank == root:
        links.exchange(dict.fromkeys(links.send, x), {})
    else:
        links.exchange({}, {root: x})


def tree_broadcast(x: torch.Tensor, links: GroupLinks, root: int) -> None:
    """Everyone's contiguous `x` becomes the root's, by the messages of `tree_reduce` in the opposite direction."""
    _broadcast_subtree(x, links, root, 0, links.size)


def scatter_all_gather_broadcast(x: torch.Tensor, links: GroupLinks, root: int) -> None:
    """Everyone's `x` becomes the root's, which sends each rank one piece; each passes its piece on to all others."""
    pieces = equal_pieces(x, links.size)
    if links.rank == root:
        links.exchange({peer: pieces[peer] for peer in links.send}, {})
    else:
        links.exchange({}, {root: pieces[links.rank]})
    passed_on = {peer: pieces[links.rank] for peer in links.send if peer != root}
    links.exchange(passed_on, {peer: pieces[peer] for peer in links.recv if links.rank != root})


def tree_pair(root: int, start: int, middle: int, stop: int) -> tuple[int, int]:
    """Of the two halves of ranks [start, stop): the rank that has the result of both, and the one of the other half."""
    left = root if start <= root < middle else start
    right = root if middle <= root < stop else middle
    return (right, left) if right == root else (left, right)


def _reduce_subtree(x: torch.Tensor, links: GroupLinks, op: str, root: int, start: int, stop: int) -> None:
    """Combine ranks [start, stop), of which this is one."""
    if stop - start == 1:
        return
    middle = start + left_subtree_size(stop - start)
    _reduce_subtree(x, links, op, root, *((start, middle) if links.rank < middle else (middle, stop)))
    receiver, sender = tree_pair(root, start, middle, stop)
    if links.rank == sender:
        links.exchange({receiver: x}, {})
    elif links.rank == receiver:
        part = links.buffers.piece(sender, x.shape, x.dtype)
        links.exchange({}, {sender: part})
        COMBINE[op](x, part, out=x)


def _broadcast_subtree(x: torch.Tensor, links: GroupLinks, root: int, start: int, stop: int) -> None:
    """Pass on to ranks [start, stop), of which this is one, what the receiver of their reduction has."""
    if stop - start == 1:
        return
    middle = start + left_subtree_size(stop - start)
    sender, receiver = tree_pair(root, start, middle, stop)
    if links.rank == sender:
        links.exchange({receiver: x}, {})
    elif links.rank == receiver:
        links.exchange({}, {sender: x})
    _broadcast_subtree(x, links, root, *((start, middle) if links.rank < middle else (middle, stop)))
