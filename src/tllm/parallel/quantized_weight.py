"""`QuantizedWeight`: a rank's part of a linear's weight in few bits, and the product with it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tllm.kernels.library import NUMBERS, PackedWeightArguments, library
from tllm.quantization.blocks import Scheme
from tllm.quantization.packed_layout import PackedTensors, padded_columns, unpack_rows
from tllm.quantization.reference_matmul import reference_matmul


@dataclass(frozen=True)
class PackedRows:
    """Some outputs of a weight, all of one scheme.

    The packed columns begin at a group of the checkpoint's tensor, up to `lead` columns before those that this rank's
    activations have, and end at a group; there the activations count as 0. `columns` are all that are packed.
    """

    tensors: PackedTensors
    scheme: Scheme
    outputs: int
    columns: int
    lead: int = 0

    def arguments(self) -> PackedWeightArguments:
        """What the kernels take; the tensors must outlive it."""
        x, scheme = self.tensors, self.scheme
        assert scheme.group in (16, 32) or scheme.group % 32 == 0 or scheme.group >= self.columns, "no product reads it"
        address = {name: tensor.data_ptr() for name, tensor in x.named().items()}
        kind = 2 if scheme.bits == 8 else 0 if scheme.table is None else 1
        super_scales = x.super_scales
        return PackedWeightArguments(
            **address,
            outputs=self.outputs,
            columns=self.columns,
            padded=padded_columns(self.columns),
            group=min(scheme.group, padded_columns(self.columns)),
            super_group=scheme.super_group,
            kind=kind,
            offset=scheme.offset,
            scale_dtype=NUMBERS[x.scales.dtype],
            super_dtype=0 if super_scales is None else NUMBERS[super_scales.dtype],
            table=(ctypes.c_uint8 * 16)(*(scheme.table or ())),
        )


class QuantizedWeight:
    """W [outputs, inputs] as parts of its outputs one after another, each packed or, where the files have it so, plain.

    Products with packed parts round the rows of x to 8 bits by groups of 32; their sums are exact within a group, so
    that an output has the same bits on every processor and whatever else is computed beside it.
    """

    def __init__(self, parts: Sequence[PackedRows | Tensor], inputs: int) -> None:
        self.parts = tuple(parts)
        self.inputs = inputs
        self.outputs = sum(part.outputs if isinstance(part, PackedRows) else len(part) for part in parts)
        self._arguments = [part.arguments() if isinstance(part, PackedRows) else None for part in parts]

    @property
    def nbytes(self) -> int:
        return sum(part.tensors.nbytes if isinstance(part, PackedRows) else part.nbytes for part in self.parts)

    def matmul(self, x_TD: Tensor, exact: bool = False) -> Tensor:
        """x W^T in x's dtype.

        `exact`: in float64, so that the partial sums of ranks make the same sum however the columns are cut.
        """
        x_TD = x_TD.contiguous()
        y_TF = torch.empty(len(x_TD), self.outputs, dtype=torch.float64 if exact else x_TD.dtype)
        at, scratch, rounded = 0, None, None
        for part, arguments in zip(self.parts, self._arguments, strict=True):
            if not isinstance(part, PackedRows) or arguments is None:
                assert isinstance(part, Tensor)
                y_TF[:, at : at + len(part)] = F.linear(x_TD, part.to(x_TD.dtype))
                at += len(part)
                continue
            kernels = library()
            wide = _widened(x_TD, part)
            if kernels is None or x_TD.dtype == torch.float64:
                y_TF[:, at : at + part.outputs] = reference_matmul(wide, part.tensors, part.scheme, part.outputs, exact)
                at += part.outputs
                continue
            like = (part.lead, part.columns)
            if scratch is None or rounded != like:
                nbytes = kernels.scratch_bytes(len(x_TD), arguments.padded)
                scratch = torch.empty(nbytes, dtype=torch.uint8)
            kernels.quantized_matmul(
                ctypes.byref(arguments),
                wide.data_ptr(),
                NUMBERS[x_TD.dtype],
                len(x_TD),
                y_TF.data_ptr() + at * y_TF.itemsize,
                self.outputs,
                NUMBERS[y_TF.dtype],
                scratch.data_ptr(),
                rounded == like,
                torch.get_num_threads(),
            )
            rounded = like
            at += part.outputs
        return y_TF

    def rows(self, ids_T: Tensor) -> Tensor:
        """The weights of these outputs in float32, [T, inputs]: an embedding's rows."""
        out = torch.empty(len(ids_T), self.inputs)
        at = 0
        for part in self.parts:
            count = part.outputs if isinstance(part, PackedRows) else len(part)
            here = torch.where((ids_T >= at) & (ids_T < at + count))[0]
            local = ids_T[here] - at
            if isinstance(part, PackedRows):
                wide = unpack_rows(part.tensors, part.scheme, local, part.columns)
                out[here] = wide[:, part.lead : part.lead + self.inputs]
            else:
                out[here] = part[local].float()
            at += count
        return out


def _widened(x_TD: Tensor, part: PackedRows) -> Tensor:
    """x with zeros where the packed columns go beyond it."""
    behind = part.columns - part.lead - x_TD.shape[1]
    return x_TD if part.lead == 0 and behind == 0 else F.pad(x_TD, (part.lead, behind))


def quantized(weight: Tensor) -> QuantizedWeight | None:
    """The packed form of a parameter, if it has one: it has no elements then."""
    found = getattr(weight, "quantized", None)
    assert found is None or isinstance(found, QuantizedWeight)
    return found


def empty_parameter(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without elements, for weights in few bits that as plain numbers would have this shape and dtype."""
    parameter = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
    parameter.stands_for = (shape, dtype)  # type: ignore[attr-defined]
    return parameter


def is_empty(parameter: Tensor) -> bool:
    """Whether it is one of those."""
    return hasattr(parameter, "stands_for")


def carry(parameter: nn.Parameter, weight: QuantizedWeight | Sequence[QuantizedWeight]) -> None:
    """Let an empty parameter stand for a weight, or for the weights of several experts."""
    assert is_empty(parameter)
    parameter.quantized = weight if isinstance(weight, QuantizedWeight) else tuple(weight)  # type: ignore[attr-defined]


def stands_for(parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of a parameter's weights as plain numbers."""
    found: tuple[torch.Size, torch.dtype] = getattr(parameter, "stands_for", (parameter.shape, parameter.dtype))
    return found


def expert_weight(weight: Tensor | Sequence[Tensor], number: int) -> Tensor | QuantizedWeight:
    """The weight of one expert of a stack."""
    packed: Sequence[QuantizedWeight] | None = getattr(weight, "quantized", None)
    return weight[number] if packed is None else packed[number]


def weight_bytes(parameter: Tensor) -> int:
    """Bytes that a parameter's weights take in memory."""
    packed = getattr(parameter, "quantized", None)
    if packed is None:
        return parameter.nbytes
    return sum(one.nbytes for one in ([packed] if isinstance(packed, QuantizedWeight) else packed))
