"""How the kernels want weights of few bits in memory: blocks of 16 outputs, a lane of a vector for each.

Codes of 8 bits: [block, columns / 4, 16 outputs, 4 columns]. Codes of 4 bits: [block, columns / 8, 16 outputs, 4], the
low half of a byte for the first four of eight columns. Scales and minima: [block, group, 16 outputs]. Outputs are
padded to whole blocks, columns to whole groups of 32; what is padded has the scale 0, or meets activations that are 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tllm.kernels.library import LANES, library
from tllm.kernels.packing import X_GROUP, pack_codes
from tllm.quantization.blocks import Blocks, Scheme, dequantize, minima_of, scales_of


@dataclass(frozen=True)
class PackedTensors:
    """The tensors of one packed weight."""

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
        return sum(x.nbytes for x in self.named().values())

    def to(self, device: torch.device) -> PackedTensors:
        """These on a device."""
        return PackedTensors(**{name: x.to(device) for name, x in self.named().items()})


def pack(blocks: Blocks, codes: Tensor | None = None) -> PackedTensors:
    """The codes and scales of a matrix in the kernels' order. Zeros become minima, in float32.

    The codes are written to `codes`, a part of `room_for_codes`, if that is given.
    """
    scales, super_scales, minima, super_minima = blocks.scales, blocks.super_scales, blocks.minima, blocks.super_minima
    if blocks.zeros is not None:
        scales, super_scales, super_minima = scales_of(blocks), None, None
        taken = blocks.zeros.float() * scales
        known = minima_of(blocks)
        minima = taken if known is None else taken + known
    elif minima is not None and minima.dtype != scales.dtype:
        scales, super_scales, minima, super_minima = scales_of(blocks), None, minima_of(blocks), None
    if codes is None:
        rows, columns = blocks.codes.shape
        codes = room_for_codes(rows, columns, blocks.scheme.bits)
    _pack_codes(blocks.codes, blocks.scheme.bits, codes)
    return PackedTensors(
        codes,
        _by_lane(scales),
        None if super_scales is None else _by_lane(super_scales),
        None if minima is None else _by_lane(minima),
        None if super_minima is None else _by_lane(super_minima),
    )


def unpack_rows(packed: PackedTensors, scheme: Scheme, rows: Tensor, columns: int) -> Tensor:
    """The weights of these outputs as float32, [len(rows), columns]: what the kernels multiply with."""
    return dequantize(unpack(packed, scheme, rows, columns))


def unpack(packed: PackedTensors, scheme: Scheme, rows: Tensor, columns: int) -> Blocks:
    """The blocks of these outputs, [len(rows), columns]; what were zeros are minima."""
    block, lane = rows // LANES, rows % LANES
    found = {name: x[block, :, lane] for name, x in packed.named().items()}
    codes = found.pop("codes")  # [rows, columns / 4 or / 8, 4]
    if scheme.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2)
    return Blocks(scheme, codes.flatten(1)[:, :columns], **found)


def padded_columns(columns: int) -> int:
    return -(-columns // X_GROUP) * X_GROUP


def packed_group(scheme: Scheme, columns: int) -> int:
    """Columns that share a scale, of so many packed ones: where all of a row do, whole groups of 32."""
    return scheme.group if scheme.group < columns else padded_columns(columns)


def room_for_codes(rows: int, columns: int, bits: int) -> Tensor:
    """Memory for the packed codes of a matrix."""
    return torch.empty(
        -(-rows // LANES), padded_columns(columns) // (4 if bits == 8 else 8), LANES, 4, dtype=torch.uint8
    )


def _pack_codes(codes: Tensor, bits: int, out: Tensor) -> None:
    rows, columns = codes.shape
    if kernels := library():
        pack_codes(kernels, codes, bits, padded_columns(columns), out)
        return
    lanes, width = -(-rows // LANES) * LANES, padded_columns(columns)
    full = codes
    if (lanes, width) != (rows, columns):
        full = codes.new_zeros((lanes, width))
        full[:rows, :columns] = codes
    if bits == 8:
        out.copy_(full.view(-1, LANES, width // 4, 4).transpose(1, 2))
        return
    halves = full.view(-1, LANES, width // 8, 2, 4)
    out.copy_((halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2))


def _by_lane(of_groups: Tensor) -> Tensor:
    """[rows, groups] -> [blocks, groups, 16]."""
    rows, groups = of_groups.shape
    lanes = -(-rows // LANES) * LANES
    full = of_groups if lanes == rows else torch.cat((of_groups, of_groups.new_zeros((lanes - rows, groups))))
    return full.view(-1, LANES, groups).transpose(1, 2).contiguous()
