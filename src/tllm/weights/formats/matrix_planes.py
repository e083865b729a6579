"""`PackedMatrix`: a linear's weight that files keep as several tensors, its planes: codes, scales, zeros."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.kernels.packing import X_GROUP
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.stored_tensor import Box
from tllm.spec.quantized.weight_bits import Coding
from tllm.weights.boxes import Shape
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

SCALES = (torch.float16, torch.bfloat16, torch.float32)
ALL = -1
"""Of a plane's axis: it is taken whole, whatever part of the matrix is wanted."""


@dataclass(frozen=True)
class Plane:
    """One tensor of the files that says something of each element of a matrix [rows, columns].

    `axes`: for each dim of the plane, the dim of the matrix that it goes along (0 or 1), or ALL. `per`: how many
    indices of that dim one index of the plane stands for; of ALL, the plane's own width.
    """

    name: str
    axes: tuple[int, ...]
    per: tuple[int, ...]

    def box(self, box: Box) -> Box:
        """The part of the plane that a part of the matrix needs."""
        return tuple(
            (0, per) if axis == ALL else (box[axis][0] // per, -(-box[axis][1] // per))
            for axis, per in zip(self.axes, self.per, strict=True)
        )


@dataclass(frozen=True)
class PackedMatrix:
    """The planes of one weight, by what they are, and what a part that can be read begins and ends with.

    `unit`: rows and columns in multiples of which parts are read, so that no word is read twice and each part begins
    at a group. A format says in `decode` how the planes become blocks.
    """

    name: str
    shape: Shape
    scheme: Scheme | None
    coding: Coding
    planes: Mapping[str, Plane] = field(hash=False)
    unit: tuple[int, int]

    def aligned(self, box: Box) -> Box:
        return tuple(
            (start // unit * unit, min(size, -(-stop // unit) * unit))
            for (start, stop), unit, size in zip(box, self.unit, self.shape, strict=True)
        )

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        return {plane.name: plane.box(box) for plane in self.planes.values()}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        raise NotImplementedError

    def tensor(self, role: str, planes: Mapping[str, Tensor]) -> Tensor:
        """The part that was read of the plane that is the weight's `role`."""
        return planes[self.planes[role].name]

    def scales(self, planes: Mapping[str, Tensor]) -> Tensor:
        """The part of the scales as it was read, all of them finite."""
        return finite(self.name, self.tensor("scales", planes))


def finite(name: str, scales: Tensor) -> Tensor:
    """The same scales; WeightsError where one is infinite or not a number."""
    if not bool(torch.isfinite(scales).all()):
        raise WeightsError(
            f"{name}: {int((~torch.isfinite(scales)).sum())} of {scales.numel()} scales that were read are not finite",
            "the file is damaged; copy it again",
        )
    return scales


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes of words along the last dim, the lowest bits first, as uint8 [..., words * bits of a word / bits]."""
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], words.element_size() * words.shape[-1])
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def part_of(x: Tensor, box: Box, dim: int, per: int) -> Tensor:
    """Of what was unpacked from whole words along the last dim, what belongs to a box, whose `dim` goes along it."""
    start, stop = box[dim]
    return x.narrow(-1, start % per, stop - start)


def column_unit(pack: int, group: int, columns: int) -> int:
    """In multiples of what columns parts are read: whole words, whole groups where a row has several, and the columns
    whose activations are rounded together."""
    return math.lcm(pack, X_GROUP, group if group < columns else 1)


def modules_with(index: Index, suffixes: Iterable[str]) -> list[str]:
    """The modules of which the files have a tensor that ends so, in order."""
    ends = tuple(f".{suffix}" for suffix in suffixes)
    return sorted({name.rpartition(".")[0] for name in index.entries if name.endswith(ends)})


def required(index: Index, module: str, part: str, *others: str) -> TensorEntry:
    """A plane's entry; WeightsError naming the weight where it is missing."""
    name = f"{module}.{part}"
    if name not in index.entries:
        there = [other for other in others if f"{module}.{other}" in index.entries]
        raise WeightsError(
            f"weight {module!r} has {', '.join(there) or 'no tensor'} and no {part} in the files",
            "copy the whole model folder; does config.json belong to these weights?",
        )
    return index.entries[name]


def check(name: str, entry: TensorEntry, dtypes: Iterable[torch.dtype], shape: Shape, why: str) -> None:
    """WeightsError where a plane has another dtype or shape than the other planes and the config ask for."""
    known = tuple(dtypes)
    if entry.dtype not in known:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in known)
        refuse(entry, name, f"holds {str(entry.dtype).removeprefix('torch.')} and {why} needs {wanted}")
    if entry.shape != shape:
        refuse(entry, name, f"has shape {entry.shape} and {why} needs {shape}")


def refuse(entry: TensorEntry, name: str, why: str) -> NoReturn:
    raise WeightsError(f"{entry.file}: tensor {name!r} {why}", "does config.json belong to these weights?")


def check_columns_of_groups(name: str, groups: Tensor, box: Box, group: int) -> None:
    """WeightsError where columns are not in groups one after the other, as a config without reordering says."""
    start, stop = box[1]
    if not torch.equal(groups, torch.arange(start, stop, dtype=groups.dtype) // group):
        raise WeightsError(
            f"{name}: g_idx puts columns of [{start}:{stop}] into other groups than their own of {group}",
            "the config says that columns are not reordered (desc_act, actorder), and the file that they are",
        )


def of_scattered(name: str, codes: Tensor, zeros: Tensor | float, scales: Tensor, groups: Tensor) -> Tensor:
    """The weights as float32 where a column's group is what `groups` says: (code - zero) * scale.

    codes [rows, columns] as float32; zeros and scales [rows, groups] of all groups; groups [columns].
    """
    count = scales.shape[-1]
    if bool(((groups < 0) | (groups >= count)).any()):
        raise WeightsError(
            f"{name}: g_idx has group {int(groups.min())} to {int(groups.max())} and there are {count} groups",
            "the file is damaged; copy it again",
        )
    at = groups.long()
    zero = zeros[:, at] if isinstance(zeros, Tensor) else zeros
    return (codes - zero) * scales.float()[:, at]
