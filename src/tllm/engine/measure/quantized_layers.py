"""Layers filled with numbers, held in as many bits as the model's weights are: what they are measured with."""

from __future__ import annotations

from torch import nn

from tllm.parallel.quantized_weight import PackedRows, QuantizedWeight, carry, empty_parameter
from tllm.parallel.shard import shard_of
from tllm.quantization.packed_layout import pack
from tllm.quantization.round_weights import round_weights
from tllm.spec.quantized.weight_bits import Coding, Quantization


def hold_in_few_bits(model: nn.Module, quantization: Quantization) -> None:
    """Round the weights that the model holds in few bits: to 4 where theirs are 4, else to 8, whatever the format.

    The products of formats with as many bits take about as long.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            coding = _coding(parameter, quantization)
            if coding is None or parameter.dim() < 2 or shard_of(parameter).plain:
                continue
            packed = empty_parameter(parameter.shape, parameter.dtype)
            packed.shard = shard_of(parameter)  # type: ignore[attr-defined]
            stack = parameter.detach() if parameter.dim() == 3 else parameter.detach()[None]
            weights = []
            for matrix in stack:
                outputs, columns = matrix.shape
                blocks = round_weights(matrix, "int4" if coding.bits == 4 else "int8")
                rows = PackedRows(pack(blocks), blocks.scheme, outputs, columns)
                weights.append(QuantizedWeight([rows], columns))
            carry(packed, weights if parameter.dim() == 3 else weights[0])
            setattr(module, name, packed)


def _coding(parameter: nn.Parameter, quantization: Quantization) -> Coding | None:
    """How the first of a parameter's pieces is held; None for plain numbers."""
    coding = quantization.coding(shard_of(parameter).pieces[0].name.removesuffix(".weight"))
    if coding is None or not coding.packed or coding.scattered or coding.number != "integer":
        return None
    return coding
