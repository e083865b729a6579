"""`FixedChoice`: a group's algorithm as a test wants it, whatever the length of a message."""

from __future__ import annotations

import torch

from tllm.comm.collectives.algorithm_choice import LengthChoice
from tllm.comm.collectives.all_reduce import AllReduceAlgorithm


class FixedChoice(LengthChoice):
    """One algorithm for every all-reduce."""

    def __init__(self, algorithm: AllReduceAlgorithm) -> None:
        self.algorithm = algorithm

    def all_reduce(self, x: torch.Tensor, op: str) -> AllReduceAlgorithm:
        return self.algorithm
