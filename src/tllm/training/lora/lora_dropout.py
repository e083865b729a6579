"""Dropout of a LoRA update's inputs by a counter-based random generator. What is dropped depends on seed, step, row,
token, linear and column alone, so every plan drops the same, and so does a layer that is recomputed."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.kernels.splitmix64 import counter_random
from tllm.training.data.seeds import key_for


def dropped_out(x_TD: Tensor, draws_T: Tensor, module: str, first_column: int, part: float) -> Tensor:
    """x / (1 - part) with about this `part` of its elements 0. `draws_T`: a number of each token's own, int64.

    `module` is the linear, `first_column` that of its inputs which x_TD begins with.
    """
    least, columns = int(part * 2**63), x_TD.shape[1]
    key = key_for("dropout", module)
    numbers = counter_random(draws_T.to(x_TD.device), key, first_column, columns, 63)
    kept = [number_TD >= least for number_TD in numbers]
    return x_TD * torch.cat(kept).to(x_TD.dtype).mul_(1 / (1 - part))
