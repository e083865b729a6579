"""`QuantizedWeight`: a rank's part of a linear's weight in few bits, and the product with it; a stack of several."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tllm.devices.choose import CPU
from tllm.kernels.batch_invariant import is_batch_invariant, make_batch_invariant
from tllm.kernels.gpu_kernels import GpuKernels, gpu_kernels
from tllm.kernels.library import (
    DTYPE_NUMBERS,
    EXPONENT,
    Library,
    PackedWeightArguments,
    WeightPartArguments,
    kernel_threads,
    library,
)
from tllm.kernels.product_ways import Way, kind_of, multiply_packed
from tllm.kernels.training.reproducible import reproducible_passes
from tllm.kernels.training.training_matmul import training_matmul
from tllm.quantization.blocks import Code, Scheme, table_on
from tllm.quantization.packed_layout import PackedTensors, packed_group, padded_columns, unpack_rows
from tllm.quantization.reference_matmul import reference_matmul

KINDS: dict[tuple[int, Code, bool], int] = {
    (4, "integer", False): 0,
    (4, "integer", True): 1,
    (8, "integer", False): 2,
    (8, "float8_e4m3", False): 3,
}
"""The kernels' number of what codes are: their bits, numbers, and whether there is a table of these."""

PLAIN_AT_ONCE = 2**20
"""Elements of a weight that are plain numbers at once in a backward pass, 4 bytes each."""

DEVICE_PLAIN_AT_ONCE = 2**22
"""The same on a device, where a smaller part would take less time than starting its operations does."""


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

    def to(self, device: torch.device) -> PackedRows:
        """These on a device."""
        return replace(self, tensors=self.tensors.to(device))

    def on_device(self, kernels: GpuKernels) -> Any:
        """What the kernels of a GPU take."""
        scheme, tensors = self.scheme, self.tensors.named()
        return kernels.few_bits.DeviceWeight(
            tensors,
            self.outputs,
            scheme.bits,
            packed_group(scheme, self.columns),
            scheme.super_group,
            scheme.offset,
            scheme.byte_bias,
            None if scheme.table is None else table_on(tensors["codes"].device, scheme.table),
            is_float8=scheme.code == "float8_e4m3",
            has_exponents=scheme.exponents,
        )

    def arguments(self) -> PackedWeightArguments:
        """What the kernels take; the tensors must outlive it."""
        x, scheme = self.tensors, self.scheme
        assert scheme.group in (16, 32) or scheme.group % 32 == 0 or scheme.group >= self.columns, "no product reads it"
        address = {name: tensor.data_ptr() for name, tensor in x.named().items()}
        kind = KINDS[scheme.bits, scheme.code, scheme.table is not None]
        super_scales = x.super_scales
        return PackedWeightArguments(
            **address,
            outputs=self.outputs,
            columns=self.columns,
            padded=padded_columns(self.columns),
            group=packed_group(scheme, self.columns),
            super_group=scheme.super_group,
            kind=kind,
            offset=scheme.offset,
            scale_dtype=EXPONENT if scheme.exponents else DTYPE_NUMBERS[x.scales.dtype],
            super_dtype=0 if super_scales is None else DTYPE_NUMBERS[super_scales.dtype],
            table=(ctypes.c_uint8 * 16)(*(scheme.table or ())),
        )


class WeightParts:
    """The parts of one weight, or of the weights of several experts, and the product of rows with all of them."""

    def __init__(self, of_experts: Sequence[Sequence[PackedRows | Tensor]], outputs: int) -> None:
        self.outputs = outputs
        self._plain: list[tuple[int, int, Tensor]] = []
        packed = defaultdict[tuple[int, int], list[tuple[int, int, PackedRows]]](list)
        for expert, parts in enumerate(of_experts):
            at = 0
            for part in parts:
                if isinstance(part, PackedRows):
                    packed[part.lead, part.columns].append((expert, at, part))
                    at += part.outputs
                else:
                    self._plain.append((expert, at, part))
                    at += len(part)
            assert at == outputs, "the weights of a stack have as many outputs"
        self._packed = [(parts, _arguments(parts)) for parts in packed.values()]
        self._of_gpu: list[list[Any]] | None = None

    def matmul(self, x_ND: Tensor, first_rows: Tensor, exact: bool) -> Tensor:
        """[N, outputs]: rows [first_rows[e], first_rows[e + 1]) with the weight of expert e.

        The gradient of x is that of a product with the weights' plain numbers: rounding x to 8 bits counts as nothing.
        """
        if torch.is_grad_enabled() and x_ND.requires_grad:
            return _Product.apply(x_ND, self, first_rows, exact)  # type: ignore[no-any-return, no-untyped-call]
        return self.product(x_ND, first_rows, exact)

    def input_gradient(self, gradient_NF: Tensor, columns: int, first_rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of x, which has this dtype, [N, columns] in float32 at least: some outputs' plain numbers are
        there at a time.

        A device, which has units for products of 16 bits, multiplies in x's dtype; each piece's part is rounded to it.
        """
        device, wide = gradient_NF.device, torch.promote_types(dtype, torch.float32)
        in_dtype, most = (wide, PLAIN_AT_ONCE) if device == CPU else (dtype, DEVICE_PLAIN_AT_ONCE)
        gradient_ND = torch.zeros(len(gradient_NF), columns, dtype=wide, device=device)
        bounds, at_once = first_rows.tolist(), max(1, most // max(1, columns))
        passes = reproducible_passes(wide) if device == CPU else None
        for expert, at, part in self._parts():
            here, outputs = slice(bounds[expert], bounds[expert + 1]), _outputs(part)
            for first in range(0, outputs if here.start < here.stop else 0, at_once):
                some = torch.arange(first, min(first + at_once, outputs), device=device)
                weight = _plain(part, some, columns).to(in_dtype)
                some_NF = gradient_NF[here, at + first : at + first + len(some)].to(in_dtype)
                if passes is not None:
                    gradient_ND[here] += passes.of_inputs(some_NF, weight)
                elif in_dtype == wide:
                    gradient_ND[here].addmm_(some_NF, weight)
                else:
                    gradient_ND[here] += some_NF @ weight
        return gradient_ND

    def _parts(self) -> Iterator[tuple[int, int, PackedRows | Tensor]]:
        """(expert, its first output, part) of each part."""
        yield from self._plain
        for parts, _ in self._packed:
            yield from parts

    def _on_device(self, kernels: GpuKernels) -> list[list[Any]]:
        """What the kernels of a GPU take of all packed parts, made once."""
        if self._of_gpu is None:
            self._of_gpu = [[part.on_device(kernels) for _, _, part in parts] for parts, _ in self._packed]
        return self._of_gpu

    def product(self, x_ND: Tensor, first_rows: Tensor, exact: bool) -> Tensor:
        """What `matmul` gives, without a gradient."""
        x_ND = x_ND.contiguous()
        dtype = torch.float64 if exact else x_ND.dtype
        y_NF = torch.empty(len(x_ND), self.outputs, dtype=dtype, device=x_ND.device)
        is_wide = x_ND.dtype == torch.float64
        kernels = library() if x_ND.is_cpu and not is_wide else None
        gpu = None if is_wide else gpu_kernels(x_ND.device.type)
        if self._plain or kernels is None:  # of experts on a device, the host waits for these
            bounds = first_rows.tolist()
        for expert, at, plain in self._plain:
            here = slice(bounds[expert], bounds[expert + 1])
            y_NF[here, at : at + len(plain)] = training_matmul(x_ND[here], plain.to(x_ND.dtype))
        for number, (parts, arguments) in enumerate(self._packed):
            wide = _widened(x_ND, parts[0][2])
            if gpu is not None:
                rounded = gpu.few_bits.round_rows(wide)
                for (expert, at, _), weight in zip(parts, self._on_device(gpu)[number], strict=True):
                    gpu.few_bits.multiply(rounded, weight, bounds[expert], bounds[expert + 1], y_NF, at)
            elif kernels is None:
                for expert, at, part in parts:
                    here = slice(bounds[expert], bounds[expert + 1])
                    y = reference_matmul(wide[here], part.tensors, part.scheme, part.outputs, exact)
                    y_NF[here, at : at + part.outputs] = y
            else:
                first = arguments[0].weight
                scratch = torch.empty(kernels.quantized.scratch_bytes(len(wide), first.padded), dtype=torch.uint8)
                outputs = sum(part.outputs for _, _, part in parts)
                kind = kind_of(len(wide) // (len(first_rows) - 1), outputs, first, exact)
                multiply_packed(kernels, kind, partial(_multiply, kernels, arguments, first_rows, wide, y_NF, scratch))
        return y_NF


class _Product(torch.autograd.Function):
    """x W^T by packed weights, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, parts: WeightParts, first_rows: Tensor, exact: bool) -> Tensor:
        ctx.parts, ctx.first_rows, ctx.columns, ctx.dtype = parts, first_rows, x_ND.shape[1], x_ND.dtype
        return parts.product(x_ND, first_rows, exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor, None, None, None]:
        gradient_ND = ctx.parts.input_gradient(gradient_NF, ctx.columns, ctx.first_rows, ctx.dtype)
        return gradient_ND.to(ctx.dtype), None, None, None


def _outputs(part: PackedRows | Tensor) -> int:
    return part.outputs if isinstance(part, PackedRows) else len(part)


def _device(part: PackedRows | Tensor) -> torch.device:
    return part.tensors.codes.device if isinstance(part, PackedRows) else part.device


def _plain(part: PackedRows | Tensor, outputs: Tensor, columns: int) -> Tensor:
    """The weights of some outputs of a part as plain numbers."""
    if isinstance(part, PackedRows):
        return unpack_rows(part.tensors, part.scheme, outputs, part.columns)[:, part.lead : part.lead + columns]
    return part[outputs]


def _arguments(parts: Sequence[tuple[int, int, PackedRows]]) -> ctypes.Array[WeightPartArguments]:
    """What the kernel takes of parts that have the same columns."""
    found = [WeightPartArguments(part.arguments(), expert, at) for expert, at, part in parts]
    return (WeightPartArguments * len(found))(*found)


def _multiply(
    kernels: Library,
    parts: ctypes.Array[WeightPartArguments],
    first_rows: Tensor,
    x_ND: Tensor,
    y_NF: Tensor,
    scratch: Tensor,
    way: Way,
) -> None:
    """Write x W^T of each part to its place in y."""
    kernels.quantized.matmul(
        parts,
        len(parts),
        first_rows.data_ptr(),
        len(first_rows) - 1,
        x_ND.data_ptr(),
        DTYPE_NUMBERS[x_ND.dtype],
        y_NF.data_ptr(),
        y_NF.shape[1],
        DTYPE_NUMBERS[y_NF.dtype],
        scratch.data_ptr(),
        way,
        kernel_threads(),
    )


class QuantizedWeight:
    """W [outputs, inputs] as parts of its outputs one after another, each packed or, where the files have it so, plain.

    Products with packed parts round the rows of x to 8 bits by groups of 32; their sums are exact within a group, so
    that an output has the same bits on every processor and whatever else is computed beside it.
    """

    def __init__(self, parts: Sequence[PackedRows | Tensor], inputs: int) -> None:
        self.parts = tuple(parts)
        self.inputs = inputs
        self.outputs = sum(map(_outputs, parts))
        self._product = WeightParts([self.parts], self.outputs)

    @property
    def nbytes(self) -> int:
        return sum(part.tensors.nbytes if isinstance(part, PackedRows) else part.nbytes for part in self.parts)

    def to(self, device: torch.device) -> QuantizedWeight:
        """This weight on a device."""
        return QuantizedWeight([part.to(device) for part in self.parts], self.inputs)

    def matmul(self, x_TD: Tensor, exact: bool = False) -> Tensor:
        """x W^T in x's dtype.

        `exact`: in float64, so that the partial sums of ranks make the same sum however the columns are cut.
        """
        return self._product.matmul(x_TD, torch.tensor((0, len(x_TD))), exact)

    def rows(self, ids_T: Tensor) -> Tensor:
        """The weights of these outputs in float32, [T, inputs]: an embedding's rows.

        The host asks a device nothing, so that this can be recorded.
        """
        out = torch.zeros(len(ids_T), self.inputs, device=ids_T.device)
        at = 0
        for part in self.parts:
            count = _outputs(part)
            if count > 0:
                found = _plain(part, (ids_T - at).clamp(0, count - 1), self.inputs).float()
                here_T = (ids_T >= at) & (ids_T < at + count)
                out = torch.where(here_T[:, None], found, out)
            at += count
        return out

    def between(self, start: int, stop: int) -> Tensor:
        """The weights of outputs [start, stop) in float32, [stop - start, inputs]."""
        found, at = list[Tensor](), 0
        for part in self.parts:
            count = _outputs(part)
            first, last = max(start - at, 0), min(stop - at, count)
            if first < last:
                found.append(_plain(part, torch.arange(first, last, device=_device(part)), self.inputs).float())
            at += count
        return torch.cat(found) if len(found) > 1 else found[0]


class QuantizedStack:
    """The weights of several experts, of one shape, [outputs, inputs] each."""

    def __init__(self, weights: Sequence[QuantizedWeight]) -> None:
        self.weights = tuple(weights)
        self._product = WeightParts([weight.parts for weight in weights], weights[0].outputs if weights else 0)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def matmul(self, x_ND: Tensor, first_rows: Tensor, exact: bool = False) -> Tensor:
        """x W^T by rows, of which those of expert e are [first_rows[e], first_rows[e + 1]).

        `first_rows`, int64 [experts + 1], begins with 0 and ends with N. In x's dtype, or `exact` as of one weight.
        """
        return self._product.matmul(x_ND, first_rows, exact)


def _widened(x_TD: Tensor, part: PackedRows) -> Tensor:
    """x with zeros where the packed columns go beyond it."""
    behind = part.columns - part.lead - x_TD.shape[1]
    return x_TD if part.lead == 0 and behind == 0 else F.pad(x_TD, (part.lead, behind))


def quantized(weight: Tensor) -> QuantizedWeight | None:
    """The packed form of a parameter, if it has one: it has no elements then."""
    found = getattr(weight, "quantized", None)
    assert found is None or isinstance(found, QuantizedWeight)
    return found


def quantized_stack(weight: Tensor) -> QuantizedStack | None:
    """The packed form of the weights of several experts, if they have one."""
    found = getattr(weight, "quantized", None)
    assert found is None or isinstance(found, QuantizedStack)
    return found


def empty_parameter(shape: torch.Size, dtype: torch.dtype, device: torch.device | None = None) -> nn.Parameter:
    """A parameter without elements, for weights in few bits that as plain numbers would have this shape and dtype."""
    parameter = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=device), requires_grad=False)
    parameter.stands_for = (shape, dtype)  # type: ignore[attr-defined]
    return parameter


def is_empty(parameter: Tensor) -> bool:
    """Whether it is one of those."""
    return hasattr(parameter, "stands_for")


def carry(parameter: nn.Parameter, weight: QuantizedWeight | QuantizedStack) -> None:
    """Let an empty parameter stand for a weight, or for the weights of several experts."""
    assert is_empty(parameter)
    parameter.quantized = weight  # type: ignore[attr-defined]


def stands_for(parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype of a parameter's weights as plain numbers."""
    found: tuple[torch.Size, torch.dtype] = getattr(parameter, "stands_for", (parameter.shape, parameter.dtype))
    return found


def expert_weight(weight: Tensor | Sequence[Tensor], number: int) -> Tensor | QuantizedWeight:
    """The weight of one expert of a stack."""
    packed: QuantizedStack | None = getattr(weight, "quantized", None)
    if packed is not None:
        return packed.weights[number]
    one = weight[number]
    if isinstance(weight, Tensor) and is_batch_invariant(weight):
        make_batch_invariant([one])
    return one


def weight_bytes(parameter: Tensor) -> int:
    """Bytes that a parameter's weights take in memory."""
    packed: QuantizedWeight | QuantizedStack | None = getattr(parameter, "quantized", None)
    return parameter.nbytes if packed is None else packed.nbytes
