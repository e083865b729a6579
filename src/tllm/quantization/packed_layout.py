"""How the kernels want weights of few bits in memory: blocks of 16 outputs, a lane of a vector for each.

Codes of 8 bits: [block, columns / 4, 16 outputs, 4 columns]. Codes of 4 bits: [block, columns / 8, 16 outputs, 4], the
low half of a byte for the first four of eight columns. Scales and minima: [block, group, 16 outputs]. Outputs are
padded to whole blocks, columns to whole groups of 32; what is padded has the scale 0, or meets activations that are 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tllm.kernels.library import library
from tllm.kernels.packing import pack_codes
from tllm.quantization.blocks import Blocks, Scheme, minima_of, scales_of

LANES = 16
X_GROUP = 32
"""Columns of the activations that share a scale."""

ALIGNMENT = 64
"""Bytes: each tensor of a packed weight begins at a multiple of this, a line of the processor's cache."""


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of one packed weight, or their shapes and dtypes where they are on the meta device."""

    codes: Tensor
    scales: Tensor
    super_scales: Tensor | None = None
    minima: Tensor | None = None
    super_minima: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Those that there are."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def nbytes(self) -> int:
        """With what aligning each takes."""
        return sum(aligned(x.nbytes) for x in self.named().values())


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(blocks: Blocks) -> PackedTensors:
    """The codes and scales of a matrix in the kernels' order. Zeros become minima, in float32."""
    scales, super_scales, minima, super_minima = blocks.scales, blocks.super_scales, blocks.minima, blocks.super_minima
    if blocks.zeros is not None:
        scales, super_scales, super_minima = scales_of(blocks), None, None
        taken = blocks.zeros.float() * scales
        known = minima_of(blocks)
        minima = taken if known is None else taken + known
    elif minima is not None and minima.dtype != scales.dtype:
        scales, super_scales, minima, super_minima = scales_of(blocks), None, minima_of(blocks), None
    return PackedTensors(
        _codes(blocks.codes, blocks.scheme.bits),
        _by_lane(scales),
        None if super_scales is None else _by_lane(super_scales),
        None if minima is None else _by_lane(minima),
        None if super_minima is None else _by_lane(super_minima),
    )


def unpack_rows(packed: PackedTensors, scheme: Scheme, rows: Tensor, columns: int) -> Tensor:
    """The weights of these outputs as float32, [len(rows), columns]: what the kernels multiply with."""
    block, lane = rows // LANES, rows % LANES
    codes = packed.codes[block, :, lane]  # [rows, columns / 4 or / 8, 4]
    if scheme.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2)
    codes = codes.flatten(1)[:, :columns].int()
    values = codes if scheme.table is None else torch.tensor(scheme.table)[codes]

    def of_columns(x: Tensor, super_x: Tensor | None) -> Tensor:
        numbers = x[block, :, lane].float()
        if super_x is not None:
            per = scheme.super_group // scheme.group
            numbers = super_x[block, :, lane].float()[:, torch.arange(numbers.shape[1]) // per] * numbers
        return numbers[:, torch.arange(columns) // scheme.group]

    weights = (values - scheme.offset).float() * of_columns(packed.scales, packed.super_scales)
    return weights if packed.minima is None else weights - of_columns(packed.minima, packed.super_minima)


def padded_columns(columns: int) -> int:
    return -(-columns // X_GROUP) * X_GROUP


def _codes(codes: Tensor, bits: int) -> Tensor:
    rows, columns = codes.shape
    if kernels := library():
        return pack_codes(kernels, codes, bits, padded_columns(columns))
    lanes, width = -(-rows // LANES) * LANES, padded_columns(columns)
    full = codes
    if (lanes, width) != (rows, columns):
        full = codes.new_zeros((lanes, width))
        full[:rows, :columns] = codes
    if bits == 8:
        return full.view(-1, LANES, width // 4, 4).transpose(1, 2).contiguous()
    halves = full.view(-1, LANES, width // 8, 2, 4)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).contiguous()


def _by_lane(of_groups: Tensor) -> Tensor:
    """[rows, groups] -> [blocks, groups, 16]."""
    rows, groups = of_groups.shape
    lanes = -(-rows // LANES) * LANES
    full = of_groups if lanes == rows else torch.cat((of_groups, of_groups.new_zeros((lanes - rows, groups))))
    return full.view(-1, LANES, groups).transpose(1, 2).contiguous()
