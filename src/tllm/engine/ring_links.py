"""`RingLinks`: the two links that join the leader of a stage to the ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.comm.collectives.compressed_hop import CompressedHop
from tllm.comm.links.link import Link


@dataclass(frozen=True)
class RingLinks:
    """A stage leader's two links: from the leader of the stage before (the last one's, for stage 0) and to the next.

    Where there are compressed hops over the same links, hidden states travel by them; all else travels as it is.
    """

    previous: Link
    next: Link
    compressed_previous: CompressedHop | None = None
    compressed_next: CompressedHop | None = None

    def send(self, x_TD: Tensor) -> None:
        """Give hidden states to the next stage."""
        (self.compressed_next or self.next).send(x_TD)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take hidden states from the stage before."""
        return (self.compressed_previous or self.previous).recv(shape, dtype)
