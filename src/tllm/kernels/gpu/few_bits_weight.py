"""A packed weight of few bits as kernels of a GPU take it, and how these read its scales."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.packing import X_GROUP

UNSPECIALIZED = ("first", "last", "y_at", "first_block", "outputs")
"""Arguments of products for whose values nothing is compiled anew, as they differ for each expert, batch and weight."""


class GroupCounts(NamedTuple):
    """Groups of `x`; groups `of_weight`; groups of x for each of the weight, where half of one counts as one; groups of
    the weight that share a super scale; and super scales."""

    x: int
    of_weight: int
    per_group: int
    per_super: int
    supers: int


class DeviceWeight(NamedTuple):
    """Packed outputs of one scheme.

    The `tensors` of a packed weight by their names; columns that share a scale, and a super scale; what is taken from
    each code's value, and as much of it as leaves a signed byte (`bias`); the `table` of 4-bit codes, uint8; whether
    codes are numbers of float8, and scales powers of two.
    """

    tensors: dict[str, Tensor]
    outputs: int
    bits: int
    group: int
    super_group: int
    offset: int
    bias: int
    table: Tensor | None
    is_float8: bool
    has_exponents: bool

    @property
    def halves(self) -> bool:
        """Whether a group of the weight is half a group of x."""
        return self.group < X_GROUP

    def addresses(self) -> tuple[Tensor, ...]:
        """Scales, super scales, minima, super minima and table; another tensor, never read, for what is not there."""
        codes = self.tensors["codes"]
        of_groups = (self.tensors.get(name, codes) for name in ("scales", "super_scales", "minima", "super_minima"))
        return *of_groups, codes if self.table is None else self.table

    def counts(self, x_groups: int) -> GroupCounts:
        """Of a product with rows of so many groups."""
        scales = self.tensors["scales"]
        return GroupCounts(
            x_groups,
            scales.shape[1],
            1 if self.halves else min(triton.cdiv(self.group, X_GROUP), x_groups),
            self.super_group // self.group if self.super_group else 1,
            self.tensors.get("super_scales", scales).shape[1],
        )

    def forms(self) -> dict[str, bool]:
        """What a kernel is compiled for."""
        return dict(
            FOUR_BITS=self.bits == 4,
            BY_TABLE=self.table is not None,
            HAS_EXPONENTS=self.has_exponents,
            HAS_SUPER="super_scales" in self.tensors,
            HAS_MINIMA="minima" in self.tensors,
            HAS_SUPER_MINIMA="super_minima" in self.tensors,
            HALVES=self.halves,
        )


@triton.jit
def _of_groups(codes, super_codes, at, super_at, mask, HAS_SUPER: tl.constexpr, HAS_EXPONENTS: tl.constexpr):
    """The scales or minima at these places, float32."""
    found = tl.load(codes + at, mask=mask, other=0)
    if HAS_EXPONENTS:
        exponents = found.to(tl.int32)
        small = tl.full(exponents.shape, 0x200000, tl.int32) << tl.minimum(exponents, 1)
        wide = tl.where(exponents < 2, small, (exponents - 1) << 23).to(tl.float32, bitcast=True)
    else:
        wide = found.to(tl.float32)
        if HAS_SUPER:
            wide = tl.load(super_codes + super_at, mask=mask, other=0.0).to(tl.float32) * wide
    return wide


@triton.jit
def of_weight(
    scales,
    super_scales,
    minima,
    super_minima,
    block,
    lane,
    is_output,
    number,
    groups,
    per_super,
    super_groups,
    HAS_SUPER: tl.constexpr,
    HAS_EXPONENTS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_SUPER_MINIMA: tl.constexpr,
):
    """The scales and minima of a group of some outputs."""
    at, super_at = (block * groups + number) * 16 + lane, (block * super_groups + number // per_super) * 16 + lane
    is_known = is_output & (number < groups)
    scale = _of_groups(scales, super_scales, at, super_at, is_known, HAS_SUPER, HAS_EXPONENTS)
    minimum = scale
    if HAS_MINIMA:
        minimum = _of_groups(minima, super_minima, at, super_at, is_known, HAS_SUPER_MINIMA, False)
    return scale, minimum


@triton.jit
def on_grid(x):
    """In float64, to the nearest multiple of 2^-30."""
    return (x.to(tl.float64) + 6291456.0) - 6291456.0
