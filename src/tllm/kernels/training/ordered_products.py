"""Products of float32 by csrc/float_matmul.c, and their gradients by csrc/float_gradients.c: each number is a sum by
itself in the order of columns, whatever is computed beside it, by as many threads as there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.kernels.float_product import multiply_by_kernel
from tllm.kernels.library import kernel_threads, library
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
    x_ND = _product(gradient_TF.flatten(0, -2).contiguous(), weight_FD.contiguous(), is_turned=False)
    return x_ND.view(*gradient_TF.shape[:-1], weight_FD.shape[1])


def ordered_weight_gradient(gradient_TF: Tensor, x_TD: Tensor) -> Tensor:
    """The gradient of W."""
    return _product(gradient_TF.flatten(0, -2).contiguous(), x_TD.flatten(0, -2).contiguous(), is_turned=True)


def _product(left: Tensor, right_KN: Tensor, is_turned: bool) -> Tensor:
    """left right_KN; of left as it is given, or turned."""
    kernels = library()
    assert kernels is not None and left.dtype == right_KN.dtype == torch.float32
    steps, columns = right_KN.shape
    rows = left.shape[is_turned]
    y = torch.empty(rows, columns)
    if not y.numel():
        return y
    scratch = torch.empty(kernels.training.float_gradient_scratch(rows, steps, is_turned))
    threads = kernel_threads() if y.numel() * steps >= SMALLEST else 1
    shape = (left.data_ptr(), right_KN.data_ptr(), rows, steps, columns, is_turned)
    kernels.training.float_gradient(*shape, y.data_ptr(), scratch.data_ptr(), threads)
    return y
