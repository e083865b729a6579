"""`ScaledMatrix`: a weight that files keep as a matrix of one code a byte, FP8 or int8, with scales of any shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.stored_tensor import Box
from tllm.spec.quantized.weight_bits import Coding
from tllm.weights.boxes import Shape
from tllm.weights.formats.matrix_planes import (
    ALL,
    SCALES,
    PackedMatrix,
    Plane,
    check,
    check_columns_of_groups,
    column_unit,
    finite,
    of_scattered,
    refuse,
)
from tllm.weights.safetensors_header import TensorEntry

FP8 = torch.float8_e4m3fn
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Scales that are powers of two: the exponent and 127 in a byte."""


class ScaledMatrix(PackedMatrix):
    """The planes of one linear: "codes", "scales", and "zeros" (int8, one a group) or "groups" where it has them.

    `coding.rows` and `coding.group` are the rows and columns that share a scale, 0 for all of them.
    """

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        stored = self.tensor("codes", planes)
        scales = expanded(powers(self.name, self.scales_of(planes)), self.planes["scales"], box)
        if stored.dtype == torch.int8:
            codes, zeros = (stored.int() + 128).to(torch.uint8), None
            if "zeros" in self.planes:
                zeros = expanded((self.tensor("zeros", planes).int() + 128).to(torch.uint8), self.planes["zeros"], box)
            if self.scheme is None:
                values = (codes.float(), 128.0 if zeros is None else zeros.float())
                return of_scattered(self.name, *values, scales, self.tensor("groups", planes))
            if "groups" in self.planes:
                check_columns_of_groups(self.name, self.tensor("groups", planes), box, self.scheme.group)
            return Blocks(self.scheme, codes, scales, zeros=zeros)
        assert self.scheme is not None
        codes = stored.view(torch.uint8)
        if bool(((codes & 127) == 127).any()):
            raise WeightsError(f"{self.name}: a weight is not a number", "the file is damaged; copy it again")
        return Blocks(self.scheme, codes, scales)

    def scales_of(self, planes: Mapping[str, Tensor]) -> Tensor:
        return self.tensor("scales", planes)


def powers(name: str, scales: Tensor) -> Tensor:
    """The scales as floating-point numbers, all of them finite: 2^(byte - 127) of exponents."""
    if scales.dtype not in EXPONENTS:
        return finite(name, scales)
    exponents = scales.view(torch.uint8)
    finite_exponents(name, exponents)
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def finite_exponents(name: str, exponents: Tensor) -> None:
    """WeightsError where a byte of exponents stands for no number."""
    if bool((exponents == 255).any()):
        finite(name, torch.where(exponents == 255, torch.nan, 0.0))


def scaled_matrix(
    module: str, codes: TensorEntry, others: Mapping[str, tuple[str, TensorEntry]], coding: Coding, why: str
) -> ScaledMatrix:
    """The matrix of a module's planes: its codes `.weight`, and the `others` by role, each with its name."""
    name, shape = f"{module}.weight", codes.shape
    if len(shape) != 2:
        refuse(codes, name, f"has shape {shape} and {why} needs two dims")
    check(name, codes, [FP8] if coding.number == "float" else [torch.int8], shape, why)
    planes = {"codes": Plane(name, (0, 1), (1, 1))}
    for role in ("scales", "zeros"):
        if role in others:
            part, entry = others[role]
            dtypes = (*SCALES, *EXPONENTS) if role == "scales" else (torch.int8,)
            planes[role] = plane_of(part, entry, shape, coding, why)
            check(part, entry, dtypes, entry.shape, why)
    if "groups" in others:
        part, entry = others["groups"]
        check(part, entry, [torch.int32, torch.int64], shape[1:], why)
        planes["groups"] = Plane(part, (1,), (1,))
    group = coding.group or max(1, shape[1])
    scheme = Scheme(
        8,
        group,
        offset=128 if coding.number == "integer" and "zeros" not in others else 0,
        code="float8_e4m3" if coding.number == "float" else "integer",
    )
    unit = 1, 1 if coding.scattered else column_unit(1, group, shape[1])
    return ScaledMatrix(name, shape, None if coding.scattered else scheme, coding, planes, unit)


def plane_of(name: str, entry: TensorEntry, shape: Shape, coding: Coding, why: str) -> Plane:
    """Where the scales, or zeros, of a matrix lie in a plane that may leave out dims of one."""
    rows, columns = coding.rows or max(1, shape[0]), coding.group or max(1, shape[1])
    grid = -(-shape[0] // rows), -(-shape[1] // columns)
    if entry.shape in ((), (1,)) and grid == (1, 1):
        return Plane(name, (ALL,) * len(entry.shape), entry.shape)
    if entry.shape == grid[:1] and grid[1] == 1:
        return Plane(name, (0,), (rows,))
    check(name, entry, [entry.dtype], grid, why)
    if coding.scattered:
        return Plane(name, (0, ALL), (rows, grid[1]))
    return Plane(name, (0, 1), (rows, columns))


def expanded(x: Tensor, plane: Plane, box: Box) -> Tensor:
    """What was read of a plane for a box, once for each row of the box: [rows, groups]."""
    (start, stop), per = box[0], plane.per[0] if plane.axes and plane.axes[0] == 0 else 0
    x = x.reshape(-1, 1) if x.ndim < 2 else x
    if per == 1:
        return x
    if per == 0:
        return x.expand(stop - start, -1).contiguous()
    return x.repeat_interleave(per, 0).narrow(0, start % per, stop - start).contiguous()
