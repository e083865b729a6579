"""How keys and values are held in the cache (`--kv-cache-dtype`): as numbers, or in one byte each. No torch."""

from __future__ import annotations

from typing import Literal, get_args

from tllm.core.errors import ConfigError

KVCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3"]
"""`auto`: the model's dtype. `fp8` is another name of `fp8_e4m3`."""

SCALE_BYTES = 4
"""Bytes of the scale that a token's key, or its value, of one kv head has beside its codes."""


def check_kv_cache_dtype(name: str) -> None:
    """ConfigError for a name that is none."""
    if name not in get_args(KVCacheDtype):
        raise ConfigError(
            f"kv_cache_dtype is {name!r}, and a cache is one of {len(get_args(KVCacheDtype))} kinds",
            "give " + ", ".join(get_args(KVCacheDtype)) + "; auto is the model's dtype",
        )


def cached_bytes(numbers: int, rows: int, item: int, kv_cache_dtype: str) -> int:
    """Bytes that one token takes in a layer's cache for one kv head: so many `numbers` in so many `rows` (a key and a
    value are two). A number of the model's dtype has `item` bytes."""
    check_kv_cache_dtype(kv_cache_dtype)
    return numbers * item if kv_cache_dtype == "auto" else numbers + rows * SCALE_BYTES
