"""Folders of FP8 linears (`quant_method` "fp8"): DeepSeek's blocks of 128 x 128, or one scale for a row or the
whole.

`weight` float8_e4m3fn [outputs, inputs]; `weight_scale_inv`, or `weight_scale`, one number for each block, by which,
despite the name, a weight is multiplied. The last blocks of rows and columns may be short. Scales are floating-point
numbers, or exponents of two.
"""

from __future__ import annotations

from dataclasses import replace

from tllm.core.errors import WeightsError
from tllm.quantization.stored_tensor import StoredTensor
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.weights.formats.matrix_planes import refuse
from tllm.weights.formats.scaled_matrix import FP8, scaled_matrix
from tllm.weights.safetensors_index import Index

SCALES = ("weight_scale_inv", "weight_scale")
"""The names of scales, which mean the same."""


def read_fp8(index: Index, quantization: Quantization) -> Index:
    """The index with each FP8 linear by its `.weight`; a matrix in FP8 without a scale is an error."""
    coding = next(coding for _, coding in reversed(quantization.rules) if coding is not None)
    stored: dict[str, StoredTensor] = {}
    for name, entry in index.entries.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and entry.dtype == FP8:
            stored[name] = _matrix(index, module, coding)
        elif part == "weight" and any(f"{module}.{scale}" in index.entries for scale in SCALES):
            refuse(entry, name, f"holds {str(entry.dtype).removeprefix('torch.')} and has scales, as float8_e4m3fn has")
        elif part in SCALES and f"{module}.weight" not in index.entries:
            raise WeightsError(
                f"weight {module!r} has {part} and no weight in the files", "copy the whole model folder"
            )
    return replace(index, stored={**index.stored, **stored})


def _matrix(index: Index, module: str, coding: Coding) -> StoredTensor:
    scale = next((name for part in SCALES if (name := f"{module}.{part}") in index.entries), None)
    if scale is None:
        raise WeightsError(
            f"weight {module!r} is in FP8 and the files have neither {SCALES[0]} nor {SCALES[1]} of it",
            "copy the whole model folder; does config.json belong to these weights?",
        )
    found, weight = index.entries[scale], index.entries[f"{module}.weight"]
    if found.shape in ((), (1,)):
        coding = replace(coding, rows=0, group=0)
    elif coding.rows == 0 and found.shape in (weight.shape[:1], (*weight.shape[:1], 1)):
        coding = replace(coding, rows=1)
    why = f"FP8 in blocks of {coding.rows or 'all'} rows and {coding.group or 'all'} columns"
    return scaled_matrix(module, weight, {"scales": (scale, found)}, coding, why)
