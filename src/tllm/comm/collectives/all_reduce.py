"""How a sum over ranks is carried out: `one_shot` for short messages, `two_step` for long ones, both direct.

Both fold the ranks' pieces as the balanced tree of `fold.py`: the same bits on every rank, whichever of them is taken.
With S bytes, n ranks, latency L and B bytes/s for each rank's sending:

    one_shot   L + (n - 1) S / B            every rank sends all it has to every other
    two_step   2 L + 2 (n - 1) / n S / B    every rank sums one piece, then sends the sum to every other

The others: `weighted.py` (as two_step, for links that are unequal), `tree.py`, `ring.py`, `hierarchy.py`.

`ring`: an all-reduce by neighbours only, n - 1 steps to sum and n - 1 to spread (Patarasuk and Yuan, 2009).

    ring   2 (n - 1) (L + S / (n B))     and 16-bit floats travel as float32 while they are summed

Every rank speaks to two others: a link that is slow between two ranks which are not neighbours costs nothing, and the
ranks of one machine, side by side, use its cable once. Piece p is added in the order p, p + 1, …, p - 1: the same bits
on all ranks, but not those of the tree that all other algorithms add by.

A binary tree over ranks: `tree`, an all-reduce for many ranks, and its two halves, to one rank and from one.

The tree is that of `fold.py`, so the bits are those of `one_shot` and `two_step` whichever rank is the root: a subtree
of ranks [start, stop) is summed by its root if it holds that, else by its first rank. With d = ceil(log2 n):

    fold_up, spread_down   d (L + S / B)       and for 16-bit floats twice the bytes on the way up
    tree                   2 d (L + S / B)     with 2 d messages for a rank at most, where one_shot has 2 (n - 1)

`Hierarchical`: a sum over ranks of which some share a machine: there first, then between machines, then there again.

With h machines and in each a leader, its first rank (L, B between machines, L_in and B_in inside):

    hierarchical   d_in (L_in + S / B_in) up and down, and between leaders `one_shot` or `two_step` of h

A machine sends (h - 1) S or 2 (h - 1) / h S bytes, whatever the number of its ranks. Each machine's sum is a tree, and
so is that of the machines: where these are parts of the tree over all ranks (`nests`), the bits are those of it.

`Weighted`: a sum over ranks whose links are unequal, as `two_step` but in chunks, and slow ranks sum less of it.

A rank that sums the share w of S bytes sends (1 - w) S to the others' pieces and (n - 1) w S of sums, and receives as
much. With k chunks the two go at once, the sums of one beside the parts of the next, so that over all

    weighted   (k + 1) L + (1 + 1 / k) max over ranks of (1 + (n - 2) w) S / B

A rank that sums nothing moves S bytes, with equal shares 2 (n - 1) / n S. The bits are those of `two_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tllm.comm.collectives.fold import COMBINE, finish, fold, full, widened
from tllm.comm.collectives.scratch import Scratch
from tllm.comm.links.link import Link
from tllm.comm.links.receive_buffer import push_all
from tllm.comm.links.send_buffer import Unsent
from tllm.core.errors import LinkError

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


class Hierarchical:
    """`hosts` says on which machine each rank is; `between` sums over machines."""

    def __init__(self, hosts: Sequence[int], between: Algorithm) -> None:
        self.hosts, self.between = tuple(hosts), between

    def __call__(self, x: torch.Tensor, ends: Ends, op: str = "sum") -> None:
        here, leaders = members(self.hosts, self.hosts[ends.rank]), leaders_of(self.hosts)
        inside, plain = ends.among(here), "sum" if op == "mean" else op
        total = widened(x, op)
        fold_up(total, inside, plain, 0)
        if inside.rank == 0:
            if len(leaders) > 1:
                self.between(total, ends.among(leaders), plain)
            finish(total, x, op, ends.size)
        spread_down(x, inside, 0)


def members(hosts: Sequence[int], host: int) -> list[int]:
    """The ranks on one machine."""
    return [rank for rank, other in enumerate(hosts) if other == host]


def leaders_of(hosts: Sequence[int]) -> list[int]:
    """The first rank of each machine, in the order of these."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


def nests(hosts: Sequence[int]) -> bool:
    """Whether each machine's ranks are a subtree: side by side, and 2^k on each but the last, which has no more."""
    runs = [members(hosts, hosts[leader]) for leader in leaders_of(hosts)]
    together = all(run[-1] - run[0] == len(run) - 1 for run in runs)
    first = len(runs[0])
    even = all(len(run) == first for run in runs[:-1]) and len(runs[-1]) <= first
    return together and even and (len(runs) == 1 or first & (first - 1) == 0)


class Weighted:
    """`shares` is how much of it each rank sums, in all 1."""

    def __init__(self, shares: Sequence[float], chunks: int) -> None:
        self.shares, self.chunks = tuple(shares), chunks

    def __call__(self, x: torch.Tensor, ends: Ends, op: str = "sum") -> None:
        flat = x.view(-1)
        bounds = [flat.numel() * i // self.chunks for i in range(self.chunks + 1)]
        summed = _cut(flat[:0], self.shares)
        for chunk in [*(flat[a:b] for a, b in pairwise(bounds)), flat[:0]]:
            pieces = _cut(chunk, self.shares)
            _turn(pieces, summed, ends, op)
            summed = pieces


def _turn(pieces: list[torch.Tensor], summed: list[torch.Tensor], ends: Ends, op: str) -> None:
    """Sum this rank's piece of one chunk, and spread the sums of the chunk before it."""
    mine, done = pieces[ends.rank], summed[ends.rank]
    sends = {peer: torch.cat((pieces[peer], done)) for peer in ends.send}
    lengths = {peer: mine.numel() + summed[peer].numel() for peer in ends.recv}
    recvs = {peer: ends.scratch.piece(peer, (length,), mine.dtype) for peer, length in lengths.items()}
    exchange(
        [(ends.send[peer], sent) for peer, sent in sends.items()],
        [(ends.recv[peer], got) for peer, got in recvs.items()],
    )
    for peer, got in recvs.items():
        summed[peer].copy_(got[mine.numel() :])
    if mine.numel():
        fold([mine if peer == ends.rank else recvs[peer][: mine.numel()] for peer in range(ends.size)], mine, op)


def _cut(run: torch.Tensor, shares: Sequence[float]) -> list[torch.Tensor]:
    """A run of elements in one piece for each rank, by shares."""
    total, bounds = 0.0, [0]
    for share in shares[:-1]:
        total += share
        bounds.append(min(round(run.numel() * total), run.numel()))
    bounds.append(run.numel())
    return [run[a:b] for a, b in pairwise(bounds)]


def shares_of(rates: Sequence[float]) -> list[float]:
    """The shares w that make the slowest of 1 + (n - 2) w over a rank's bytes/s least; w >= 0, in all 1.

    Those that sum anything end together, at t = (n - 2 + m) / (the rates of these m); a rank whose 1 / rate is more
    sums nothing.
    """
    n = len(rates)
    assert n > 2, "two ranks send each other all they have"
    active = sorted(range(n), key=lambda rank: -rates[rank])
    while True:
        time = (n - 2 + len(active)) / sum(rates[rank] for rank in active)
        if rates[active[-1]] * time >= 1:
            break
        active.pop()
    return [max((rates[rank] * time - 1) / (n - 2), 0.0) if rank in active else 0.0 for rank in range(n)]
