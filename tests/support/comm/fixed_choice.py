"""`FixedChoice`: a group's algorithm as a test wants it, whatever the length of a message."""

from __future__ import annotations

import torch

from tllm.comm.collectives.algorithm_choice import LengthChoice
from tllm.comm.collectives.all_reduce import AllReduceAlgorithm
from tllm.comm.collectives.reduce_scatter import HierarchicalAllGather, HierarchicalReduceScatter


class FixedChoice(LengthChoice):
    """One algorithm for every all-reduce."""

    def __init__(self, algorithm: AllReduceAlgorithm) -> None:
        self.algorithm = algorithm

    def all_reduce(self, x: torch.Tensor, op: str) -> AllReduceAlgorithm:
        return self.algorithm


class ByHost(LengthChoice):
    """Reduce-scatter and all-gather in each machine first, of `per_host` ranks, and between machines, whatever the
    length."""

    def __init__(self, size: int, per_host: int) -> None:
        super().__init__(size)
        self.per_host = per_host

    def reduce_scatter(self, nbytes: int, dtype: torch.dtype, op: str) -> HierarchicalReduceScatter:
        return HierarchicalReduceScatter(self.per_host)

    def all_gather(self, nbytes: int) -> HierarchicalAllGather:
        return HierarchicalAllGather(self.per_host)
