"""Weights in few bits: `Scheme`, how a format codes them, and `Blocks`, the codes and scales of one part of a matrix.

A weight is `scale * (value(code) - zero) - minimum`. The scale is that of the weight's group, a run of columns of one
row; where a format keeps scales in few bits too, a scale is `super_scale * scale_code`, and so is a minimum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Code = Literal["integer", "float8_e4m3"]


@dataclass(frozen=True)
class Scheme:
    """How a format codes weights.

    - `bits` of a code: 4 or 8. Formats of 5 and 6 bits have codes of 8 bits here.
    - `group`: columns that share a scale. A row's last group may be short.
    - `offset`: what is taken from each code's value, the same for all weights. 0 where there are zeros or minima.
    - `table`: the 16 values of 4-bit codes that are no plain numbers, in ascending or any other order.
    - `super_group`: columns that share a super scale (a multiple of `group`), 0 where scales are plain numbers.
    - `code`: what a code is, a whole number or a float8 number.
    - `exponents`: whether scales are uint8 and stand for powers of two, 2^(scale - 128).
    """

    bits: Literal[4, 8]
    group: int
    offset: int = 0
    table: tuple[int, ...] | None = None
    super_group: int = 0
    code: Code = "integer"
    exponents: bool = False

    def __post_init__(self) -> None:
        assert self.table is None or (self.bits == 4 and len(self.table) == 16)
        assert self.super_group % self.group == 0

    @property
    def byte_bias(self) -> int:
        """What leaves a signed byte when it is taken from a code's value: the offset where it does, else 128."""
        values = self.table or (0, 2**self.bits - 1)
        fits = min(values) - self.offset >= -128 and max(values) - self.offset <= 127
        return self.offset if fits else 128


MXFP4 = Scheme(4, 32, offset=12, table=(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), exponents=True)
"""4-bit floating-point numbers (OCP Microscaling Formats 1.0): twice the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives, all of them 12 higher, so that they are whole numbers of 0 or more. Scales are half of what the format's own
bytes stand for, 2^(byte - 127)."""


@dataclass(frozen=True)
class Blocks:
    """A part of a matrix, [rows, columns] (or a stack of them, with dims before these), that begins at a group.

    - `codes`: uint8 [rows, columns], one code a byte (float8 codes by their bits).
    - `scales`: [rows, groups] of float32, float16 or bfloat16; uint8 or int8 codes where there are `super_scales`, and
      uint8 where they are `exponents`.
    - `super_scales`: [rows, super groups], floating point.
    - `zeros`: uint8 [rows, groups], what is taken from each code's value, where it differs among groups.
    - `minima`, `super_minima`: as the scales; what is taken from the scaled weight.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    super_scales: Tensor | None = None
    zeros: Tensor | None = None
    minima: Tensor | None = None
    super_minima: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """The tensors that there are, by their names."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "scheme"}
        return {name: x for name, x in found.items() if x is not None}

    def narrow(self, dim: int, start: int, stop: int) -> Blocks:
        """Rows (dim -2) or columns (dim -1, from the start of a super group) [start, stop) of these."""
        per = self.scheme.group if dim == -1 else 1
        per_super = self.scheme.super_group if dim == -1 and self.scheme.super_group else per
        assert dim == -2 or start % max(per, per_super) == 0, "a part begins at a group"
        of_one = {"codes": 1, "super_scales": per_super, "super_minima": per_super}  # columns that an index stands for

        def cut(x: Tensor, per: int) -> Tensor:
            return x.narrow(dim, start // per, -(-stop // per) - start // per)

        return Blocks(self.scheme, **{name: cut(x, of_one.get(name, per)) for name, x in self.named().items()})


def dequantize(blocks: Blocks) -> Tensor:
    """The weights as float32, [..., rows, columns]: each operation of the formula above is rounded once, in order."""
    scheme, columns = blocks.scheme, blocks.codes.shape[-1]
    values = values_of(blocks) - scheme.offset
    if blocks.zeros is not None:
        values = values - _of_columns(blocks.zeros.float(), scheme.group, columns)
    weights = values * _of_columns(scales_of(blocks), scheme.group, columns)
    minima = minima_of(blocks)
    return weights if minima is None else weights - _of_columns(minima, scheme.group, columns)


def plain_numbers(found: Blocks | Tensor) -> Tensor:
    """The weights as plain numbers, of blocks or of what is plain already."""
    return dequantize(found) if isinstance(found, Blocks) else found


def scales_of(blocks: Blocks) -> Tensor:
    """The scale of each group as float32, [..., rows, groups]."""
    if blocks.scheme.exponents:
        return _power_of_two(blocks.scales)
    return _scaled(blocks.scales, blocks.super_scales, blocks.scheme)


def minima_of(blocks: Blocks) -> Tensor | None:
    """The minimum of each group as float32, [..., rows, groups], where the format has them."""
    return None if blocks.minima is None else _scaled(blocks.minima, blocks.super_minima, blocks.scheme)


def _power_of_two(codes: Tensor) -> Tensor:
    """2^(code - 128) by the bits of float32, of which the two smallest are denormal."""
    exponents = codes.int()
    return torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23).view(torch.float32)


def _scaled(codes: Tensor, scales: Tensor | None, scheme: Scheme) -> Tensor:
    if scales is None:
        return codes.float()
    groups = codes.shape[-1]
    return _of_columns(scales.float(), scheme.super_group // scheme.group, groups) * codes.float()


def values_of(blocks: Blocks) -> Tensor:
    """What the codes stand for, as float32."""
    scheme = blocks.scheme
    if scheme.code == "float8_e4m3":
        return blocks.codes.view(torch.float8_e4m3fn).float()
    if scheme.table is not None:
        return table_on(blocks.codes.device, scheme.table)[blocks.codes.int()].float()
    return blocks.codes.float()


def _of_columns(of_groups: Tensor, group: int, columns: int) -> Tensor:
    """Each group's number once for each of its columns."""
    return of_groups[..., torch.arange(columns, device=of_groups.device) // group]


@functools.cache
def table_on(device: torch.device, table: tuple[int, ...]) -> Tensor:
    """The values of a scheme's codes, uint8. They are copied to a device once: a graph can record no copy."""
    return torch.tensor(table, dtype=torch.uint8).to(device)
