"""The dtypes of safetensors as torch's, and a tensor's memory as bytes that a file can be read into or written from."""

from __future__ import annotations

import ctypes

import torch

from tllm.core.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' name of each dtype that torch computes with."""

COMPUTED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Those that models are computed in, by the name that `config.json` and the command line use."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this machine's memory, not a copy. The caller keeps the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype to compute in, by its name."""
    if name not in COMPUTED:
        raise ConfigError(f"dtype {name!r} is not one that models are computed in", "known: " + ", ".join(COMPUTED))
    return COMPUTED[name]
