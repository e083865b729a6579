"""`Weighted`: a sum over ranks whose links are unequal, as `two_step` but in chunks, and slow ranks sum less of it.

A rank that sums the share w of S bytes sends (1 - w) S to the others' pieces and (n - 1) w S of sums, and receives as
much. With k chunks the two go at once, the sums of one beside the parts of the next, so that over all

    weighted   (k + 1) L + (1 + 1 / k) max over ranks of (1 + (n - 2) w) S / B

A rank that sums nothing moves S bytes, with equal shares 2 (n - 1) / n S. The bits are those of `two_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from tllm.comm.algorithms import Ends, exchange
from tllm.comm.fold import fold


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
