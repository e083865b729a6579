"""Attention over whole documents with gradients, by the kernels: csrc/causal_attention.c, in bfloat16 by tiles (AMX).

A token sees those of its document up to itself, or the last `window` of these. Sums are in float32, and scores are
never in memory: the backward pass computes them anew (FlashAttention-2, 2307.08691). A document's numbers do not depend
on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.library import DTYPE_NUMBERS, DTYPES, LANES, CausalAttentionArguments, kernel_threads, library


def fits(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> bool:
    """Whether there are kernels for these: of a dtype that they have, and heads of whole vectors."""
    heads = q_TNH.shape[1] % k_TKH.shape[1] == 0 and q_TNH.shape[2] % LANES == 0 and k_TKH.shape == v_TKH.shape
    return heads and q_TNH.is_cpu and q_TNH.dtype in DTYPES and library() is not None


def causal_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, lengths: Sequence[int], scale: float, window: int | None = None
) -> Tensor:
    """softmax(q k^T scale) v [T, N, H] inside each document, with gradients.

    The N query heads are a multiple of the K kv heads. `lengths` are the tokens of each document, T together; `window`
    is how many of them a token sees, itself among them, or None for all up to itself.
    """
    documents = _Documents(lengths, scale, window)
    out_TNH: Tensor = _CausalAttention.apply(q_TNH, k_TKH, v_TKH, documents)  # type: ignore[no-untyped-call]
    return out_TNH


class _Documents:
    """What the kernel is told of documents that follow one another."""

    def __init__(self, lengths: Sequence[int], scale: float, window: int | None) -> None:
        self.count, self.longest = len(lengths), max(lengths)
        self.first_token = (c_int64 * (len(lengths) + 1))(0, *accumulate(lengths))
        self.scale, self.window = scale, window or self.longest

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *gradients: Tensor) -> None:
        """Write what comes out and the logarithm of each row's sum; or, given the gradient of what came out, those of
        q, keys and values."""
        kernels = library()
        assert kernels is not None and self.first_token[self.count] == len(q)
        (tokens, heads, width), threads, dtype = q.shape, kernel_threads(), DTYPE_NUMBERS[q.dtype]
        of_kernel = kernels.training
        size = of_kernel.attention_scratch_bytes(width, self.longest, dtype, bool(gradients), threads)
        scratch = torch.empty(size, dtype=torch.uint8)
        addresses = [x.data_ptr() for x in (q, k, v, out, log_sums, *gradients)] + [None] * (4 - len(gradients))
        arguments = CausalAttentionArguments(
            *addresses,
            addressof(self.first_token),
            scratch.data_ptr(),
            *(self.count, tokens, self.longest, heads, k.shape[1], width),
            *(q.stride(0), k.stride(0), v.stride(0), self.window, dtype, self.scale),
        )
        of_kernel.attend(byref(arguments), threads)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, documents: _Documents) -> Tensor:
        q_TNH, k_TKH, v_TKH = (_whole_tokens(x) for x in (q_TNH, k_TKH, v_TKH))
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        log_sums_NT = torch.empty(q_TNH.shape[1], len(q_TNH))
        documents.attend(q_TNH, k_TKH, v_TKH, out_TNH, log_sums_NT)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, log_sums_NT)
        ctx.documents = documents
        return out_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TNH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_TNH, k_TKH, v_TKH, *_ = ctx.saved_tensors
        of_q, of_k, of_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q_TNH, k_TKH, v_TKH))
        ctx.documents.attend(*ctx.saved_tensors, gradient_TNH.contiguous(), of_q, of_k, of_v)
        return of_q, of_k, of_v, None


def _whole_tokens(x_TNH: Tensor) -> Tensor:
    """With nothing between a token's heads. Tokens may lie apart, as those of a product that is cut in three do."""
    return x_TNH if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) else x_TNH.contiguous()
