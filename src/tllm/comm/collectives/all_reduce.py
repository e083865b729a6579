"""All-reduce algorithms: each rank's tensor becomes all ranks' tensors combined by one operation.

Notation: n ranks, S bytes of the message, L seconds of latency of a link, B bytes/s that a rank sends at,
d = ceil(log2 n). Costs are seconds.

    one_shot_all_reduce    L + (n - 1) S / B                 1 round, every rank sends all it has to every other
    two_step_all_reduce    2 L + 2 (n - 1) / n S / B         2 rounds: reduce-scatter, then all-gather
    tree_all_reduce        2 d (L + S / B)                   2 d rounds: tree reduce, then tree broadcast
    ring_all_reduce        2 (n - 1) (L + S / (n B))         2 (n - 1) rounds, with messages between neighbours only
    HierarchicalAllReduce  inside each machine, between machines, inside each machine again
    WeightedAllReduce      k + 1 rounds of k chunks: as two-step, where the ranks' links are unequal

`two_step_all_reduce` has the two phases of Rabenseifner's algorithm ("Optimization of collective reduction operations",
2004; see also Thakur, Rabenseifner and Gropp, 2005). There they take log2 n rounds each, by recursive halving and
doubling; here each is one round of direct messages between all pairs, since every rank has a link to every other.
`ring_all_reduce` is that of Patarasuk and Yuan ("Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009).

All but the ring combine ranks in the order of the balanced binary tree of `fold.py`: the result has the same bits on
every rank and for every such algorithm (for `HierarchicalAllReduce` where `hosts_are_subtrees`). The ring combines in
another order, which is also the same on every rank. Where partial results travel (tree, ring, hierarchical), 16-bit
floats do so as float32, with twice the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from tllm.comm.collectives.fold import COMBINE, finish_reduction, fold, widened
from tllm.comm.collectives.group_links import GroupLinks, equal_pieces
from tllm.comm.collectives.reduce_and_broadcast import tree_broadcast, tree_reduce
from tllm.comm.collectives.reduce_scatter import direct_all_gather, direct_reduce_scatter

LATENCY_BYTES = 64 * 1024
"""L B, the bandwidth-delay product: bytes that a link could carry while one message is on its way."""

AllReduceAlgorithm = Callable[[torch.Tensor, GroupLinks, str], None]
"""Replaces contiguous `x` by all ranks' `x` combined by an op of `fold.COMBINE`."""

ROOT = 0


def one_shot_limit(size: int, latency_bytes: float = LATENCY_BYTES) -> float:
    """Bytes up to which one-shot costs less than two-step; no limit for two ranks, where both send S bytes."""
    return math.inf if size <= 2 else latency_bytes / ((size - 1) * (1 - 2 / size))


def one_shot_all_reduce(x: torch.Tensor, links: GroupLinks, op: str = "sum") -> None:
    """All-reduce in one round: every rank sends all of `x` to every other, and combines what it receives."""
    buffers, shape, dtype = links.buffers, x.shape, x.dtype
    pieces, received = [x] * (len(links.recv) + 1), dict[int, torch.Tensor]()
    for peer in links.recv:
        pieces[peer] = received[peer] = buffers.piece(peer, shape, dtype)
    links.exchange(dict.fromkeys(links.send, x), received)
    fold(pieces, x, op)


def two_step_all_reduce(x: torch.Tensor, links: GroupLinks, op: str = "sum") -> None:
    """All-reduce in two rounds: each rank combines one piece (reduce-scatter) and sends it to all (all-gather)."""
    pieces = equal_pieces(x, links.size)
    direct_reduce_scatter(pieces, pieces[links.rank], links, op)
    direct_all_gather(pieces, links)


def ring_all_reduce(x: torch.Tensor, links: GroupLinks, op: str = "sum") -> None:
    """Ring all-reduce: n - 1 rounds of reduce-scatter and n - 1 of all-gather, each with one piece to the next rank.

    A rank sends to one neighbour and receives from the other, so a slow link between two ranks that are not neighbours
    costs nothing, and the ranks of one machine, if they are consecutive, use its network port once. Piece p is combined
    in the order p, p + 1, …, p - 1.
    """
    rank, size = links.rank, links.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    totals, pieces = equal_pieces(widened(x, op), size), equal_pieces(x, size)
    for step in range(size - 1):
        mine = totals[(rank - step - 1) % size]
        part = links.buffers.piece(previous, mine.shape, mine.dtype)
        links.exchange({following: totals[(rank - step) % size]}, {previous: part})
        COMBINE[op](part, mine, out=mine)
    complete = (rank + 1) % size
    finish_reduction(totals[complete], pieces[complete], op, size)
    for step in range(size - 1):
        links.exchange({following: pieces[(complete - step) % size]}, {previous: pieces[(complete - step - 1) % size]})


def tree_all_reduce(x: torch.Tensor, links: GroupLinks, op: str = "sum") -> None:
    """All-reduce for many ranks: a tree reduce to rank 0, then a tree broadcast from it.

    A rank has 2 d messages at most, where one-shot has 2 (n - 1): less where the work for a message is what costs.
    """
    tree_reduce(x, links, op, ROOT)
    tree_broadcast(x, links, ROOT)


class HierarchicalAllReduce:
    """Hierarchical all-reduce, for ranks of which some share a machine: there first, then between, then there again.

    `hosts[rank]` is the number of a rank's machine. In each machine a tree reduce to its first rank, the leader; the
    algorithm `between` over the leaders; a tree broadcast from each leader. With h machines a machine sends (h - 1) S
    bytes (one-shot between) or 2 (h - 1) / h S (two-step), whatever the number of its ranks.
    """

    def __init__(self, hosts: Sequence[int], between: AllReduceAlgorithm) -> None:
        self.hosts, self.between = tuple(hosts), between

    def __call__(self, x: torch.Tensor, links: GroupLinks, op: str = "sum") -> None:
        here, leaders = ranks_on_host(self.hosts, self.hosts[links.rank]), leader_ranks(self.hosts)
        inside, partial_op = links.among(here), "sum" if op == "mean" else op
        total = widened(x, op)
        tree_reduce(total, inside, partial_op, ROOT)
        if inside.rank == ROOT:
            if len(leaders) > 1:
                self.between(total, links.among(leaders), partial_op)
            finish_reduction(total, x, op, links.size)
        tree_broadcast(x, inside, ROOT)


def ranks_on_host(hosts: Sequence[int], host: int) -> list[int]:
    """The ranks on one machine."""
    return [rank for rank, other in enumerate(hosts) if other == host]


def leader_ranks(hosts: Sequence[int]) -> list[int]:
    """The first rank of each machine, in ascending order."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())


def hosts_are_subtrees(hosts: Sequence[int]) -> bool:
    """Whether each machine's ranks are a subtree of the tree over all ranks, so that the bits are the same.

    They are where each machine's ranks are consecutive and each has the same power of two of them; the last may have
    fewer.
    """
    machines = [ranks_on_host(hosts, hosts[leader]) for leader in leader_ranks(hosts)]
    consecutive = all(ranks[-1] - ranks[0] == len(ranks) - 1 for ranks in machines)
    first = len(machines[0])
    even = all(len(ranks) == first for ranks in machines[:-1]) and len(machines[-1]) <= first
    return consecutive and even and (len(machines) == 1 or first & (first - 1) == 0)


class WeightedAllReduce:
    """Two-step all-reduce for ranks with unequal links: a rank with a slow one combines a smaller share of the message.

    `shares[rank]` is the part of the message that a rank combines; all are 1 together. A rank of share w sends
    (1 - w) S bytes for the others' pieces and (n - 1) w S of results, and receives as much. The message is cut into
    k = `chunks`, and the results of one chunk travel in the same round as the parts of the next:

        (k + 1) L + (1 + 1 / k) max over ranks of (1 + (n - 2) w) S / B

    A rank with share 0 moves S bytes, where equal shares move 2 (n - 1) / n S.
    """

    def __init__(self, shares: Sequence[float], chunks: int) -> None:
        self.shares, self.chunks = tuple(shares), chunks

    def __call__(self, x: torch.Tensor, links: GroupLinks, op: str = "sum") -> None:
        flat = x.view(-1)
        bounds = [flat.numel() * i // self.chunks for i in range(self.chunks + 1)]
        combined = _weighted_pieces(flat[:0], self.shares)
        for chunk in [*(flat[a:b] for a, b in pairwise(bounds)), flat[:0]]:
            pieces = _weighted_pieces(chunk, self.shares)
            _weighted_round(pieces, combined, links, op)
            combined = pieces


def _weighted_round(pieces: list[torch.Tensor], combined: list[torch.Tensor], links: GroupLinks, op: str) -> None:
    """Combine this rank's piece of one chunk, and all-gather the combined pieces of the chunk before it."""
    mine, done = pieces[links.rank], combined[links.rank]
    sends = {peer: torch.cat((pieces[peer], done)) for peer in links.send}
    lengths = {peer: mine.numel() + combined[peer].numel() for peer in links.recv}
    recvs = {peer: links.buffers.piece(peer, (length,), mine.dtype) for peer, length in lengths.items()}
    links.exchange(sends, recvs)
    for peer, received in recvs.items():
        combined[peer].copy_(received[mine.numel() :])
    if mine.numel():
        fold([mine if peer == links.rank else recvs[peer][: mine.numel()] for peer in range(links.size)], mine, op)


def _weighted_pieces(flat: torch.Tensor, shares: Sequence[float]) -> list[torch.Tensor]:
    """Consecutive views of a flat tensor, one for each rank, with lengths in proportion to the shares."""
    total, bounds = 0.0, [0]
    for share in shares[:-1]:
        total += share
        bounds.append(min(round(flat.numel() * total), flat.numel()))
    bounds.append(flat.numel())
    return [flat[a:b] for a, b in pairwise(bounds)]


def balanced_shares(rates: Sequence[float]) -> list[float]:
    """The shares w >= 0, 1 together, that minimize the maximum over ranks of (1 + (n - 2) w) / rate, for n > 2.

    `rates` are bytes/s of each rank. Of the m ranks with a share over 0 all take the same time
    t = (n - 2 + m) / (the sum of their rates). A rank for which 1 / rate exceeds t gets share 0.
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
