"""What the C library does with memory that is given back: it keeps it for the next batch."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP = 2**30
LARGEST_SERVED = 32 * 2**20
"""Bytes; glibc takes no more. Longer tensors are mapped, and unmapped when freed."""

LARGEST_TRAINED = 4 * 2**20
"""A step has pieces of all sizes at once: long ones that lie in the heap leave holes there (docs/log.md)."""


def keep_freed_memory(largest: int = LARGEST_SERVED) -> bool:
    """For a process that only runs a model: tensors of up to `largest` bytes. False where the C library has no such
    setting.

    Each layer's activations are a few MiB, which glibc would map and unmap for every operation; prompts of 512 tokens
    go a quarter faster (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest) and mallopt(M_TRIM_THRESHOLD, KEEP))


def give_back_memory() -> None:
    """What the C library keeps goes back to the system, where it can: what comes next needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
