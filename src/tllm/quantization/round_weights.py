"""Rounding plain weights to few bits, as `--quantize` does while a model is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.kernels import packing
from tllm.kernels.library import library
from tllm.quantization.blocks import Blocks, Scheme
from tllm.spec.quantized.weight_form import Quantize

GROUP = 32
SCHEMES: dict[Quantize, Scheme] = {"int8": Scheme(8, GROUP, offset=128), "int4": Scheme(4, GROUP, offset=8)}
"""Groups of 32 columns with a float16 scale: 8.5 and 4.5 bits a weight."""


def round_weights(weights: Tensor, kind: Quantize) -> Blocks:
    """[rows, columns] to the nearest codes, the columns beginning at a group.

    The scale makes the number of largest size -8 in 4 bits, as there is no +8 (GGUF's Q4_0), and 127 of either sign in
    8 bits. It is rounded to float16 before codes are chosen.
    """
    scheme, kernels = SCHEMES[kind], library()
    if kernels is not None and weights.dtype != torch.float64:
        return Blocks(scheme, *packing.round_weights(kernels, weights, scheme.bits))
    rows, columns = weights.shape
    groups = torch.zeros(rows, -(-columns // GROUP) * GROUP)
    groups[:, :columns] = weights.float()
    groups = groups.view(rows, -1, GROUP)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (extreme.abs() / 127 if kind == "int8" else extreme / -8).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    low, high = (-127, 127) if kind == "int8" else (-8, 7)
    codes = (groups * inverse[..., None]).round().clamp(low, high) + scheme.offset
    return Blocks(scheme, codes.to(torch.uint8).view(rows, -1)[:, :columns].contiguous(), scales)
