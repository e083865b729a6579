"""Codes and scales of weights while they are loaded, by kernels: what `quantization` does, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.kernels.library import NUMBERS, Library

LANES = 16
"""Outputs of a block of a packed weight."""

X_GROUP = 32
"""Columns of the activations that share a scale, and of weights that are rounded while they are loaded."""


def pack_codes(kernels: Library, codes: Tensor, bits: int, padded: int) -> Tensor:
    """uint8 [rows, columns] to [blocks, padded columns / 4 or / 8, 16, 4]."""
    rows, columns = codes.shape
    codes = codes.contiguous()
    out = torch.empty(-(-rows // LANES), padded // (4 if bits == 8 else 8), LANES, 4, dtype=torch.uint8)
    kernels.pack_codes(codes.data_ptr(), rows, columns, padded, bits, out.data_ptr(), torch.get_num_threads())
    return out


def round_weights(kernels: Library, weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[rows, columns] to the nearest codes, uint8 [rows, columns], and float16 scales of groups of 32 columns."""
    weights = weights.contiguous()
    rows, columns = weights.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // X_GROUP), dtype=torch.float16)
    kernels.round_weights(
        weights.data_ptr(),
        NUMBERS[weights.dtype],
        rows,
        columns,
        bits,
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return codes, scales
