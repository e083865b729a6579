"""Keys and values in one byte each: codes, with a scale for each kv head and slot.

A row x, one head's key or value of one token, becomes codes c and a scale s, with x about c s:

    s = max |x| / L, but the smallest normal float32 at least      L, the largest code, is 127 (int8) or 448 (fp8)
    c = x / s, to the nearest code, ties to even

all in float32. Every row is rounded alone by single operations, so that its codes are the same whatever batch it comes
in, and csrc/cache_codes.c gives the same bits. A row with something that is not finite has codes of 0 and a scale that
is not finite, so that whoever reads it gets what is not a number, as from a cache without codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.core.errors import ConfigError
from tllm.spec.quantized.cache_form import check_kv_cache_dtype

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
E4M3 = getattr(torch, "float8_e4m3fn", None)
"""torch's name of numbers of 4 bits of exponent and 3 of mantissa; None where it has none."""


@dataclass(frozen=True)
class CacheCoding:
    """A kind of codes: the dtype of their bytes, and the largest. Codes of fp8 are held as uint8, its bits."""

    dtype: torch.dtype
    largest: float


INT8 = CacheCoding(torch.int8, 127.0)
FP8 = CacheCoding(torch.uint8, 448.0)


def coding_of(kv_cache_dtype: str) -> CacheCoding | None:
    """The codes of a cache; None where it has the model's numbers. ConfigError where there is no such cache here."""
    check_kv_cache_dtype(kv_cache_dtype)
    if kv_cache_dtype == "auto":
        return None
    if kv_cache_dtype == "int8":
        return INT8
    if E4M3 is None:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, and torch {torch.__version__} has no float8_e4m3fn",
            "give int8, which takes as many bytes, or install a later torch",
        )
    return FP8


def rounded(coding: CacheCoding, x_TKH: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, K, H] and scales [T, K, 1] of rows."""
    x_TKH = x_TKH.float()
    scales_TK1 = (x_TKH.abs().amax(-1, keepdim=True) / coding.largest).clamp_min(SMALLEST_NORMAL)
    y_TKH = (x_TKH / scales_TK1).masked_fill(~scales_TK1.isfinite(), 0.0)
    if coding.dtype == torch.uint8:
        assert E4M3 is not None, "coding_of has looked"
        return y_TKH.to(E4M3).view(torch.uint8), scales_TK1
    return y_TKH.round().to(torch.int8), scales_TK1


def numbers_of(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for, in `dtype`."""
    if codes.dtype == torch.uint8:
        assert E4M3 is not None, "coding_of has looked"
        codes = codes.view(E4M3)
    return (codes.float() * scales).to(dtype)
