"""Products of float32 by csrc/float_matmul.c: each number is a sum by itself in the order of columns, whatever is
computed beside it, by as many threads as there are.

The kernel multiplies rows by rows. Gradients are products of columns, which are copied to rows first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.kernels.float_product import multiply_by_kernel
from tllm.kernels.library import LANES, kernel_threads, library
from tllm.kernels.product_ways import Way

SMALLEST = 2**16
"""Multiplications. Fewer are done by one thread, as to wake others takes longer."""


def ordered_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T, without gradients."""
    kernels = library()
    assert kernels is not None and x_TD.dtype == weight_FD.dtype == torch.float32
    outputs, columns = weight_FD.shape
    x_ND, weight_FD = x_TD.flatten(0, -2).contiguous(), weight_FD.contiguous()
    y_NF = torch.empty(len(x_ND), outputs)
    threads = kernel_threads() if y_NF.numel() * columns >= SMALLEST else 1
    multiply_by_kernel(kernels, x_ND, weight_FD, y_NF, Way.SIDE_BY_SIDE, threads)
    return y_NF.view(*x_TD.shape[:-1], outputs)


def ordered_input_gradient(gradient_TF: Tensor, weight_FD: Tensor) -> Tensor:
    """The gradient of x."""
    return ordered_matmul(gradient_TF, weight_FD.t())


def ordered_weight_gradient(gradient_TF: Tensor, x_TD: Tensor) -> Tensor:
    """The gradient of W."""
    return ordered_matmul(_columns(gradient_TF), _columns(x_TD))


def _columns(x_TD: Tensor) -> Tensor:
    """x^T, whose rows are whole vectors: zeros after them add nothing."""
    x_ND = x_TD.flatten(0, -2)
    x_DN = torch.zeros(x_ND.shape[1], -(-len(x_ND) // LANES) * LANES)
    x_DN[:, : len(x_ND)] = x_ND.t()
    return x_DN
