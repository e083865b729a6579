"""Attention of whole documents while a model trains: by our kernel, where that is faster on this machine than torch's.

torch's attention for processors multiplies small pieces one after another, which for bfloat16 and short documents takes
several times as long as it need (docs/log/training.md). So each machine times both once, and keeps what it found
(`kernels/autotune.py`). Their numbers differ by rounding only.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice, fastest
from tllm.kernels.library import is_torch_held
from tllm.kernels.training.causal_attention import causal_attention, fits
from tllm.model.attention import AttentionSpec
from tllm.training.attention.attention_dtype import attention_dtype

LENGTHS, HEADS, WIDTH = (256, 256), 4, 64
"""Documents and heads of what is timed, forward and backward."""

KERNEL, TORCH = "kernel", "torch"


class KernelAttentionKind(NamedTuple):
    """Attention that is alike."""

    dtype: torch.dtype
    threads: int


choices = Autotuned[KernelAttentionKind]("attention of training by a kernel")
_chosen: set[torch.dtype] = set()
"""Dtypes of which it is the kernel's."""


def choose_kernel(dtype: torch.dtype, fixed: bool = False) -> bool:
    """Whether models of this dtype have the kernel's attention from now on; `fixed` leaves all to torch."""
    if not fixed and has_kernel(dtype) and choose_way(dtype).name == KERNEL:
        _chosen.add(dtype)
    else:
        _chosen.discard(dtype)
    return dtype in _chosen


def choose_way(dtype: torch.dtype) -> Choice:
    """What is known of this dtype on as many threads, measured if nothing is."""
    kind = KernelAttentionKind(dtype, torch.get_num_threads())
    return choices.choose(kind, (KERNEL, TORCH), partial(measure, dtype))


def measure(dtype: torch.dtype) -> Choice:
    """Time both ways, forward and backward. The kernel's threads take documents as they come to them, so torch must be
    clearly faster."""
    return fastest({name: partial(_there_and_back, dtype, name) for name in (KERNEL, TORCH)}, KERNEL)


def takes(spec: AttentionSpec, lengths: list[int], q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> bool:
    """Whether this layer's attention over such documents is the kernel's: its threads share documents and kv heads. It
    always is where torch has one thread."""
    shared = len(lengths) * k_TKH.shape[1] >= torch.get_num_threads()
    chosen = is_torch_held() or (shared and q_TNH.dtype in _chosen)
    return chosen and spec.softcap is None and fits(q_TNH, k_TKH, v_TKH)


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this process has one for models of this dtype."""
    x_TNH = torch.empty(1, 1, WIDTH, dtype=dtype)
    return fits(x_TNH, x_TNH, x_TNH)


def _there_and_back(dtype: torch.dtype, name: str) -> None:
    shape = (sum(LENGTHS), HEADS, WIDTH)
    with torch.enable_grad():
        q_TNH, k_TNH, v_TNH = (torch.full(shape, 0.5, dtype=dtype, requires_grad=True) for _ in range(3))
        if name == KERNEL:
            y = causal_attention(q_TNH, k_TNH, v_TNH, LENGTHS, WIDTH**-0.5)
        else:
            within = attention_dtype(dtype)
            by_head = [x.to(within).view(len(LENGTHS), -1, HEADS, WIDTH).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH)]
            y = F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True).to(dtype)
    torch.autograd.grad(y, (q_TNH, k_TNH, v_TNH), torch.ones_like(y))
