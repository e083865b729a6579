"""Layers filled with numbers and held in the model's own few bits, with which surveys measure quantised models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.parallel.quantized_weight import PackedRows, QuantizedStack, QuantizedWeight, carry, empty_parameter
from tllm.parallel.shard import shard_of
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.packed_layout import pack
from tllm.quantization.round_weights import round_weights
from tllm.spec.quantized.weight_bits import Coding, Quantization, has_products


def hold_in_few_bits(model: nn.Module, quantization: Quantization) -> None:
    """Hold the weights that the model has in few bits so: in float8, in 4 bits where theirs are 4, else in 8.

    The products of formats with as many bits take about as long. They are packed by the processor, wherever they lie.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            coding = _coding(parameter, quantization)
            if coding is None or parameter.dim() < 2 or shard_of(parameter).plain:
                continue
            packed = empty_parameter(parameter.shape, parameter.dtype, parameter.device)
            packed.shard = shard_of(parameter)  # type: ignore[attr-defined]
            stack = parameter.detach() if parameter.dim() == 3 else parameter.detach()[None]
            if packed.shard.matrices:  # type: ignore[attr-defined]
                stack = stack.transpose(1, 2)
            weights = []
            for matrix in stack:
                outputs, columns = matrix.shape
                blocks = _blocks(matrix.cpu(), coding)
                rows = PackedRows(pack(blocks), blocks.scheme, outputs, columns)
                weights.append(QuantizedWeight([rows.to(parameter.device)], columns))
            carry(packed, QuantizedStack(weights) if parameter.dim() == 3 else weights[0])
            setattr(module, name, packed)


def _coding(parameter: nn.Parameter, quantization: Quantization) -> Coding | None:
    """How the first of a parameter's pieces is held; None for plain numbers."""
    coding = quantization.coding(shard_of(parameter).pieces[0].name.removesuffix(".weight"))
    return None if coding is None or coding.scattered or not has_products(coding.group) else coding


def _blocks(matrix: Tensor, coding: Coding) -> Blocks:
    """A matrix of equal numbers, in as many bits as the coding has."""
    if coding.number == "integer":
        return round_weights(matrix, "int4" if coding.bits == 4 else "int8")
    group = coding.group or matrix.shape[1]
    codes = torch.ones_like(matrix).to(torch.float8_e4m3fn).view(torch.uint8)
    return Blocks(Scheme(8, group, code="float8_e4m3"), codes, matrix[:, ::group].float())
