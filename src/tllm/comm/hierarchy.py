"""`Hierarchical`: a sum over ranks of which some share a machine: there first, then between machines, then there again.

With h machines and in each a leader, its first rank (L, B between machines, L_in and B_in inside):

    hierarchical   d_in (L_in + S / B_in) up and down, and between leaders `one_shot` or `two_step` of h

A machine sends (h - 1) S or 2 (h - 1) / h S bytes, whatever the number of its ranks. Each machine's sum is a tree, and
so is that of the machines: where these are parts of the tree over all ranks (`nests`), the bits are those of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tllm.comm.algorithms import Algorithm, Ends
from tllm.comm.fold import finish, widened
from tllm.comm.tree import fold_up, spread_down


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
