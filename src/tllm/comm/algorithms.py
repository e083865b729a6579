"""How a sum over ranks is carried out: `one_shot` for short messages, `two_step` for long ones, both direct.

Both fold the ranks' pieces as the balanced tree of `fold.py`: the same bits on every rank, whichever of them is taken.
With S bytes, n ranks, latency L and B bytes/s for each rank's sending:

    one_shot   L + (n - 1) S / B            every rank sends all it has to every other
    two_step   2 L + 2 (n - 1) / n S / B    every rank sums one piece, then sends the sum to every other

The others: `weighted.py` (as two_step, for links that are unequal), `tree.py`, `ring.py`, `hierarchy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tllm.comm.fold import fold
from tllm.comm.inbox import push_all
from tllm.comm.link import Link
from tllm.comm.outbox import Unsent
from tllm.comm.scratch import Scratch
from tllm.ground.errors import LinkError

LATENCY_BYTES = 64 * 1024  # L * B: what a link could carry while one message is on its way

Links = Mapping[int, Link]  # by index of the other rank in the group
Message = tuple[Link, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ends:
    """What one rank of a group works with: its index, its ends of the links to and from all others, and its buffers."""

    rank: int
    send: Links
    recv: Links
    scratch: Scratch

    @property
    def size(self) -> int:
        return len(self.send) + 1

    def among(self, members: Sequence[int]) -> Ends:
        """The ends of a smaller group, numbered as in `members`, which holds this rank."""
        others = [(index, rank) for index, rank in enumerate(members) if rank != self.rank]
        send, recv = ({index: links[rank] for index, rank in others} for links in (self.send, self.recv))
        return Ends(list(members).index(self.rank), send, recv, self.scratch)


Algorithm = Callable[[torch.Tensor, Ends, str], None]
"""Replaces contiguous `x` by all ranks' `x` combined by an op of `fold.COMBINE`."""


def one_shot_limit(size: int, latency_bytes: float = LATENCY_BYTES) -> float:
    """Bytes up to which `one_shot` is the faster of the two; for two ranks it always is, since both send S bytes."""
    return math.inf if size <= 2 else latency_bytes / ((size - 1) * (1 - 2 / size))


def one_shot(x: torch.Tensor, ends: Ends, op: str = "sum") -> None:
    """In one hop: every rank sends all it has to every other."""
    rank, scratch, shape, dtype = ends.rank, ends.scratch, x.shape, x.dtype
    pieces = [x if peer == rank else scratch.piece(peer, shape, dtype) for peer in range(ends.size)]
    exchange([(link, x) for link in ends.send.values()], [(link, pieces[peer]) for peer, link in ends.recv.items()])
    fold(pieces, x, op)


def two_step(x: torch.Tensor, ends: Ends, op: str = "sum") -> None:
    """In two hops: each rank sums one piece, and sends it to every other."""
    pieces = cut(x, ends.size)
    fold_piece(pieces, pieces[ends.rank], ends, op)
    spread_pieces(pieces, ends)


def cut(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Contiguous `x` in as many flat pieces as there are ranks, as equal as can be."""
    flat = x.view(-1)
    bounds = [flat.numel() * i // size for i in range(size + 1)]
    return [flat[bounds[i] : bounds[i + 1]] for i in range(size)]


def fold_piece(pieces: Sequence[torch.Tensor], mine: torch.Tensor, ends: Ends, op: str) -> None:
    """mine = all ranks' pieces for this one, combined; it holds this rank's own before. (n - 1) / n of the bytes go."""
    parts = [
        mine if peer == ends.rank else ends.scratch.piece(peer, mine.shape, mine.dtype) for peer in range(ends.size)
    ]
    exchange(
        [(link, pieces[peer]) for peer, link in ends.send.items()],
        [(link, parts[peer]) for peer, link in ends.recv.items()],
    )
    fold(parts, mine, op)


def spread_pieces(pieces: Sequence[torch.Tensor], ends: Ends) -> None:
    """Everyone's piece to everyone, straight into place."""
    exchange(
        [(link, pieces[ends.rank]) for link in ends.send.values()],
        [(link, pieces[peer]) for peer, link in ends.recv.items()],
    )


def spread_direct(x: torch.Tensor, ends: Ends, root: int) -> None:
    """Everyone's `x` becomes root's: L + (n - 1) S / B."""
    if ends.rank == root:
        exchange([(link, x) for link in ends.send.values()], [])
    else:
        exchange([], [(ends.recv[root], x)])


def spread_in_pieces(x: torch.Tensor, ends: Ends, root: int) -> None:
    """Everyone's `x` becomes root's, which sends each a piece to pass on: 2 L + 2 (n - 1) / n S / B."""
    pieces = cut(x, ends.size)
    if ends.rank == root:
        exchange([(link, pieces[peer]) for peer, link in ends.send.items()], [])
    else:
        exchange([], [(ends.recv[root], pieces[ends.rank])])
    passed_on = [(link, pieces[ends.rank]) for peer, link in ends.send.items() if peer != root]
    exchange(passed_on, [(link, pieces[peer]) for peer, link in ends.recv.items() if ends.rank != root])


def fold_direct(x: torch.Tensor, ends: Ends, op: str, root: int) -> None:
    """`x` of root becomes all ranks' combined; L + (n - 1) S / B."""
    if ends.rank != root:
        exchange([(ends.send[root], x)], [])
        return
    pieces = [x if peer == root else ends.scratch.piece(peer, x.shape, x.dtype) for peer in range(ends.size)]
    exchange([], [(link, pieces[peer]) for peer, link in ends.recv.items()])
    fold(pieces, x, op)


def exchange(sends: list[Message], recvs: list[Message]) -> None:
    """Send and receive all of these at once, in this thread and without copies, whatever their length.

    A tensor to be sent may be overwritten only when this returns.
    """
    unsent: list[Unsent] = []
    try:
        for link, x in sends:
            left = link.start(x)
            if left is not None:
                unsent.append(left)
        for link, x in recvs:
            link.recv(x.shape, x.dtype, x, unsent)
        if unsent:
            push_all(unsent)
    except LinkError:
        for left in unsent:
            left.abandon()
        raise
