"""Codes and scales of weights while they are loaded, by kernels: what `quantization` does, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.kernels.library import DTYPE_NUMBERS, LANES, Library

X_GROUP = 32
"""Columns of the activations that share a scale, and of weights that are rounded while they are loaded."""


def pack_codes(kernels: Library, codes: Tensor, bits: int, padded: int, out: Tensor) -> None:
    """uint8 [rows, columns] to `out`, contiguous, [blocks, padded columns / 4 or / 8, 16, 4]."""
    rows, columns = codes.shape
    codes = codes.contiguous()
    assert out.is_contiguous() and out.shape == (-(-rows // LANES), padded // (4 if bits == 8 else 8), LANES, 4)
    kernels.loading.pack_codes(codes.data_ptr(), rows, columns, padded, bits, out.data_ptr(), torch.get_num_threads())


def split_nibbles(kernels: Library, qs: Tensor, run: int) -> Tensor:
    """Bytes of blocks, [..., blocks, bytes], to codes of 4 bits, [..., blocks, 2 * bytes].

    Of each `run` bytes, a multiple of 16, the low halves come first and then the high ones.
    """
    assert qs.stride(-1) == 1 and qs.shape[-1] % run == 0 and run % 16 == 0, "a block has whole runs"
    blocks = qs.flatten(0, -2)
    codes = torch.empty(*qs.shape[:-1], 2 * qs.shape[-1], dtype=torch.uint8)
    kernels.loading.split_nibbles(
        blocks.data_ptr(),
        len(blocks),
        blocks.stride(0),
        qs.shape[-1],
        run,
        codes.data_ptr(),
        torch.get_num_threads(),
    )
    return codes


def round_weights(kernels: Library, weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[rows, columns] to the nearest codes, uint8 [rows, columns], and float16 scales of groups of 32 columns."""
    weights = weights.contiguous()
    rows, columns = weights.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // X_GROUP), dtype=torch.float16)
    kernels.loading.round_weights(
        weights.data_ptr(),
        DTYPE_NUMBERS[weights.dtype],
        rows,
        columns,
        bits,
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return codes, scales
