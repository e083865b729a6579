"""The dtype in which attention of 16-bit models is computed while they train: their own, or float32 where that is
faster.

torch's attention for processors multiplies in the dtype that it is given. Without instructions for bfloat16 that takes
up to twelve times as long as float32 does (docs/log/training.md). So each machine times both once, and keeps what it
found (`kernels/autotune.py`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.training.training_matmul import TRAINED_IN_16_BITS, WIDE, in_own, wide_or_own

HEADS, LENGTH, WIDTH = 1, 256, 64
"""Of what is timed, forward and backward."""


class TrainedAttentionKind(NamedTuple):
    """Attention that is alike."""

    dtype: torch.dtype
    threads: int


measured = Autotuned[TrainedAttentionKind]("attention of training")
_chosen: dict[torch.dtype, torch.dtype] = {}


def choose_attention_dtype(dtype: torch.dtype, fixed: bool = False) -> torch.dtype:
    """Choose for models of this dtype; `fixed` leaves it as it is."""
    if dtype not in TRAINED_IN_16_BITS:
        return dtype
    wide = not fixed and choose_attention(dtype).name == WIDE
    _chosen[dtype] = torch.float32 if wide else dtype
    return _chosen[dtype]


def choose_attention(dtype: torch.dtype) -> Choice:
    """What is known of this dtype on as many threads, measured if nothing is."""
    kind = TrainedAttentionKind(dtype, torch.get_num_threads())
    return measured.choose(kind, (WIDE, in_own(dtype)), partial(measure, dtype))


def measure(dtype: torch.dtype) -> Choice:
    """Time both ways, forward and backward."""
    return wide_or_own(partial(_there_and_back, dtype, torch.float32), partial(_there_and_back, dtype, dtype), dtype)


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """What was chosen for models of this dtype; their own, if nothing was."""
    return _chosen.get(dtype, dtype)


def _there_and_back(dtype: torch.dtype, within: torch.dtype) -> Tensor:
    with torch.enable_grad():
        q_BNTH, k_BNTH, v_BNTH = (
            torch.full((1, HEADS, LENGTH, WIDTH), 0.5, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        y_BNTH = F.scaled_dot_product_attention(
            q_BNTH.to(within), k_BNTH.to(within), v_BNTH.to(within), is_causal=True
        ).to(dtype)
    return torch.autograd.grad(y_BNTH, q_BNTH, torch.ones_like(y_BNTH))[0]
