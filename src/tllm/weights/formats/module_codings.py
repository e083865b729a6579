"""What the config says of a module that the files have in few bits."""

from __future__ import annotations

from tllm.core.errors import WeightsError
from tllm.quantization.blocks import Scheme
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.weights.safetensors_index import Index


def scheme_of(coding: Coding, group: int) -> Scheme | None:
    """How packed whole numbers are to be read; None where their columns lie anywhere."""
    offset = 1 << (coding.bits - 1) if coding.symmetric else 0
    return None if coding.scattered else Scheme(8 if coding.bits == 8 else 4, group, offset=offset)


def coding_of(quantization: Quantization, index: Index, module: str) -> Coding:
    """The coding of a quantised module, where the files decide whether it is one and the config how.

    A module that the config leaves out, such as a head that is quantised all the same, is coded as most others are.
    WeightsError where the files have it in plain numbers too, or the config says nothing that fits.
    """
    if f"{module}.weight" in index.entries:
        raise WeightsError(
            f"the files have {module!r} both as a plain weight and in few bits",
            "does config.json belong to these weights?",
        )
    coding = quantization.coding(module) or next((coding for _, coding in reversed(quantization.rules) if coding), None)
    if coding is None:
        raise WeightsError(
            f"the files have {module!r} in few bits and quantization_config does not say in how many",
            "does config.json belong to these weights?",
        )
    return coding
