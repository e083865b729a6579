"""Products of a training step whose bits do not hang on the number of threads, as a run that is `deterministic` asks.

Those of many of torch's functions do (docs/log/training.md): a sum is made of each thread's part, the last numbers of a
part are computed in another way than those before, and libraries divide a product otherwise among two threads than
among four. So torch computes by one thread then (`torch_by_one_thread`), and what takes the most time is made by all:
attention, norms and gates by kernels, and so are products of float32, whose sums have one order in `ordered_products`,
whatever is computed beside them. Other products are torch's, in blocks of which a thread makes each.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.kernels.library import is_torch_held, kernel_threads, library
from tllm.kernels.training.ordered_products import ordered_input_gradient, ordered_matmul, ordered_weight_gradient

LEAST_IN_BLOCK = 2**23
"""Multiplications of a block that torch makes, which takes longer than to hand it to a thread."""

BLOCKS = 32
"""Of a product at most."""

ALIGNED = 64
"""Rows or columns of a block are a multiple of this."""


class Passes(NamedTuple):
    """How a product y_TF = x_TD W^T with W [F, D] is made, and what its gradient gives."""

    forward: Callable[[Tensor, Tensor], Tensor]
    """(x_TD, W) -> y_TF."""
    of_inputs: Callable[[Tensor, Tensor], Tensor]
    """(the gradient of y_TF, W) -> that of x_TD."""
    of_weight: Callable[[Tensor, Tensor], Tensor]
    """(the gradient of y_TF, x_TD) -> that of W."""


def reproducible_passes(dtype: torch.dtype) -> Passes | None:
    """How threads share products of this dtype where torch has one; None where it has them all."""
    if not is_torch_held():
        return None
    return BY_KERNEL if dtype == torch.float32 and library() is not None else IN_BLOCKS


def in_blocks(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """The product, without gradients: cut along its longer side into blocks, each of which one thread makes.

    How it is cut hangs on its shape alone.
    """
    rows, columns = len(left_MK), right_KN.shape[1]
    blocks = min(BLOCKS, rows * columns * len(right_KN) // LEAST_IN_BLOCK)
    if blocks < 2:
        return left_MK @ right_KN
    y_MN, size = left_MK.new_empty(rows, columns), -(-max(rows, columns) // (blocks * ALIGNED)) * ALIGNED
    if rows >= columns:
        cut = zip(torch.split(left_MK, size), torch.split(y_MN, size), strict=True)
        parts = [(some, right_KN, y) for some, y in cut]
    else:
        cut = zip(torch.split(right_KN, size, 1), torch.split(y_MN, size, 1), strict=True)
        parts = [(left_MK, some, y) for some, y in cut]
    threads = kernel_threads()
    for _ in map(_make, parts) if threads == 1 else _workers(threads).map(_make, parts):
        pass
    return y_MN


def _make(part: tuple[Tensor, Tensor, Tensor]) -> None:
    left, right, y = part
    with torch.inference_mode():  # y may be of such a pass, of a teacher say
        torch.mm(left, right, out=y)


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "products", initializer=_have_no_helpers)


def _have_no_helpers() -> None:
    """Of this thread. torch keeps their number in one place, which a thread reads when it first asks."""
    torch.set_num_threads(1)
    torch.get_num_threads()


def _forward(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return in_blocks(_rows(x_TD), weight_FD.t()).view(*x_TD.shape[:-1], len(weight_FD))


def _input_gradient(gradient_TF: Tensor, weight_FD: Tensor) -> Tensor:
    return in_blocks(_rows(gradient_TF), weight_FD).view(*gradient_TF.shape[:-1], weight_FD.shape[1])


def _weight_gradient(gradient_TF: Tensor, x_TD: Tensor) -> Tensor:
    return in_blocks(_rows(gradient_TF).t(), _rows(x_TD))


def _rows(x_TD: Tensor) -> Tensor:
    return x_TD.flatten(0, -2)


IN_BLOCKS = Passes(_forward, _input_gradient, _weight_gradient)
BY_KERNEL = Passes(ordered_matmul, ordered_input_gradient, ordered_weight_gradient)
