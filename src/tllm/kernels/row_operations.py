"""The small operations of a layer in one pass over memory each, where torch would take several.

`takes(x)` says whether they can be used: without gradients, on the CPU, in float32, bfloat16 or float16. Each is equal
to torch's steps within rounding, and has the same bits on every processor.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tllm.kernels.library import FLOAT8, NUMBERS, AttentionArguments, CacheRowsArguments, Library, library

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Those that `gated` has, by the numbers that csrc/row_operations.c gives them."""

HEAD_LANES, MOST_HEAD_WIDTH, MOST_HEADS = 16, 640, 128
"""A head's width is whole vectors of so many numbers; the kernel has room for so wide and so many that share keys."""


def takes(x: Tensor) -> Library | None:
    """The kernels, if they can be used for x."""
    if torch.is_grad_enabled() or not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return library()


def rms_norm(kernels: Library, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
    """w x / sqrt(mean(x^2) + eps) over the last dim; (1 + w) in w's place if it `adds_one`."""
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    kernels.rms_norm(
        x.data_ptr(),
        NUMBERS[x.dtype],
        x.numel() // width,
        width,
        weight.data_ptr(),
        NUMBERS[weight.dtype],
        eps,
        adds_one,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def gated(kernels: Library, gate_up_TF: Tensor, activation: str) -> Tensor:
    """act(gate) * up, for gate and up side by side in rows [T, 2 F]."""
    gate_up_TF = gate_up_TF.contiguous()
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype)
    kernels.gated(
        gate_up_TF.data_ptr(),
        NUMBERS[gate_up_TF.dtype],
        rows,
        width,
        ACTIVATIONS[activation],
        y_TF.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TF


def rotate_in_place(kernels: Library, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's halves (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin), in x's own memory.

    cos and sin [T, 1, dim] in x's dtype, the first half of sin negative. Where the heads of a token do not follow one
    another, it happens in a copy.
    """
    rows, heads, width = x_TNH.shape
    if x_TNH.stride()[1:] != (width, 1):
        x_TNH = x_TNH.contiguous()
    kernels.rotate(
        x_TNH.data_ptr(),
        NUMBERS[x_TNH.dtype],
        rows,
        x_TNH.stride(0),
        heads,
        width,
        cos.shape[-1],
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return x_TNH


class TokenAttention:
    """Attention of single tokens of many sequences over a paged cache, as one call for each layer.

    `runs` are each token's visible slots, in the order of positions; `first_heads` are the first query head of each kv
    head, and the number of heads at the end.
    """

    def __init__(
        self,
        kernels: Library,
        runs: Sequence[Sequence[range]],
        first_heads: Sequence[int],
        scale: float,
        softcap: float,
    ) -> None:
        self._kernels = kernels
        flat = [number for of_token in runs for run in of_token for number in (run.start, len(run))]
        starts = [0]
        for of_token in runs:
            starts.append(starts[-1] + len(of_token))
        most = max(sum(map(len, of_token)) for of_token in runs)
        most_keys = -(-most // HEAD_LANES) * HEAD_LANES
        most_heads = most_shared(first_heads)
        self._runs = torch.tensor(flat, dtype=torch.int64)
        self._starts = torch.tensor(starts, dtype=torch.int64)
        self._heads = torch.tensor(first_heads, dtype=torch.int64)
        self._threads = torch.get_num_threads()
        self._scores = torch.empty(self._threads * most_heads * most_keys)
        self._arguments = AttentionArguments(
            runs=self._runs.data_ptr(),
            first_run=self._starts.data_ptr(),
            first_head=self._heads.data_ptr(),
            scores=self._scores.data_ptr(),
            tokens=len(runs),
            heads=first_heads[-1],
            kv_heads=len(first_heads) - 1,
            most_keys=most_keys,
            most_heads=most_heads,
            scale=scale,
            softcap=softcap,
        )

    def __call__(
        self,
        q_TNH: Tensor,
        keys_KSH: Tensor,
        values_KSH: Tensor,
        key_scales_KS1: Tensor | None = None,
        value_scales_KS1: Tensor | None = None,
    ) -> Tensor:
        """[T, N, H], for q [T, N, H] and a layer's slots [K, slots, H], which are codes where there are scales."""
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        a = self._arguments
        a.q, a.keys, a.values, a.out = (x.data_ptr() for x in (q_TNH, keys_KSH, values_KSH, out_TNH))
        a.q_stride, a.slots, a.width, a.dtype = q_TNH.stride(0), keys_KSH.shape[1], q_TNH.shape[2], NUMBERS[q_TNH.dtype]
        a.cache_dtype = a.dtype
        if key_scales_KS1 is not None and value_scales_KS1 is not None:
            a.key_scales, a.value_scales = key_scales_KS1.data_ptr(), value_scales_KS1.data_ptr()
            a.cache_dtype = FLOAT8 if keys_KSH.dtype == torch.uint8 else NUMBERS[keys_KSH.dtype]
        self._kernels.cache.token_attention(ctypes.byref(a), self._threads)
        return out_TNH


def write_codes(kernels: Library, x_TKH: Tensor, places_T: Tensor, codes_KSH: Tensor, scales_KS1: Tensor) -> None:
    """Round each head's row of x to codes and a scale, and write them to the slots `places_T`: int8, or e4m3 where
    codes are uint8. engine/compute/cache_codes.py says how."""
    heads, slots, width = codes_KSH.shape
    if x_TKH.stride()[1:] != (width, 1):
        x_TKH = x_TKH.contiguous()
    rows = CacheRowsArguments(
        x=x_TKH.data_ptr(),
        places=places_T.data_ptr(),
        codes=codes_KSH.data_ptr(),
        scales=scales_KS1.data_ptr(),
        rows=len(places_T),
        stride=x_TKH.stride(0),
        heads=heads,
        width=width,
        slots=slots,
        dtype=NUMBERS[x_TKH.dtype],
        coding=FLOAT8 if codes_KSH.dtype == torch.uint8 else NUMBERS[codes_KSH.dtype],
    )
    kernels.cache.write_codes(ctypes.byref(rows), torch.get_num_threads())


def fits(width: int, first_heads: Sequence[int]) -> bool:
    """Whether the kernel has room for heads of this width, and for as many as share a kv head."""
    return width % HEAD_LANES == 0 and width <= MOST_HEAD_WIDTH and most_shared(first_heads) <= MOST_HEADS


def most_shared(first_heads: Sequence[int]) -> int:
    """The most query heads that share a kv head."""
    return max(b - a for a, b in itertools.pairwise(first_heads))
