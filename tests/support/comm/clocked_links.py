"""Links inside the process that count hops: a message carries its sender's clock, and one hop later is its arrival."""

from __future__ import annotations

import torch

from tllm.comm.collectives.group import Group
from tllm.comm.links.link import DEADLINE, LocalLink


class ClockedLink(LocalLink):
    """`clocks[rank]` is how many one-way delays have passed for a rank: those of the longest chain of messages."""

    def __init__(self, source: int, target: int, clocks: list[int], deadline: float = DEADLINE) -> None:
        super().__init__(source, target, deadline)
        self.clocks = clocks
        self.stamps: list[int] = []

    def _put(self, message: torch.Tensor | bytes, size: int) -> None:
        self.stamps.append(self.clocks[self.source] + 1)
        super()._put(message, size)

    def _take(self, what: str) -> torch.Tensor | bytes:
        message = super()._take(what)
        self.clocks[self.target] = max(self.clocks[self.target], self.stamps.pop(0))
        return message


def clocked_groups(size: int) -> tuple[list[Group], list[int], dict[tuple[int, int], ClockedLink]]:
    """A group for each rank, their clocks, and the links, which also count bytes."""
    clocks = [0] * size
    links = {(a, b): ClockedLink(a, b, clocks) for a in range(size) for b in range(size) if a != b}
    groups = [
        Group(
            rank,
            size,
            {b: links[rank, b] for b in range(size) if b != rank},
            {a: links[a, rank] for a in range(size) if a != rank},
        )
        for rank in range(size)
    ]
    return groups, clocks, links
