"""What a training process holds beside tensors that live: freed pieces of the C library's heap, and what torch loads.

Measured with glibc as ranks that train set it (`core.memory`) and one thread, over shapes and plans of
`benchmarks/memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

FRAGMENTATION, FRAGMENTATION_16_BIT = 0.25, 0.5
"""Of what passes take in the heap: freed pieces between those that live, too small for what comes next. Of 16-bit
numbers, which are made float32 for a moment again and again, it is more."""

LARGEST_KEPT = 4 * 2**20
"""Bytes; longer pieces are mapped by themselves, and leave no hole when they are freed."""

TRAINER_BYTES = 284 * 2**20
"""A worker that trains, before any weight: Python, torch, and what their kernels keep (measured; docs/log.md)."""

READER_BYTES = 14 * 2**20
"""What rank 0 has beside, as it reads the texts."""

SYMBOLS_BYTES = 36 * 2**20
"""sympy, which torch imports as soon as a backward pass is given a gradient: memory of a process with and without."""


def heap_bytes(passes: int, pieces: Sequence[int], is_narrow: bool) -> int:
    """Freed memory that the heap keeps at the most, beside `passes` bytes of activations and of what works on them.

    Each of `pieces`, the sizes of the largest that come and go, leaves a hole once something smaller lies in it.
    """
    return int((FRAGMENTATION_16_BIT if is_narrow else FRAGMENTATION) * passes) + sum(pieces)


def heap_part(size: int, piece: int) -> int:
    """Bytes of `size`, in pieces of about `piece`, that the heap has and keeps when they are freed: all or nothing."""
    return size if piece <= LARGEST_KEPT else 0


def largest_heap_piece(sizes: Iterable[int]) -> int:
    """The largest that is not mapped, and so leaves a hole."""
    return max((size for size in sizes if size <= LARGEST_KEPT), default=0)


def runtime_bytes(spec: ModelSpec, plan: Plan, rank: int, runs: tuple[range, ...]) -> int:
    """The process of a rank that computes, before any weight."""
    return TRAINER_BYTES + READER_BYTES * (rank == 0) + symbols_bytes(spec, plan, runs)


def symbols_bytes(spec: ModelSpec, plan: Plan, runs: tuple[range, ...]) -> int:
    """Of a stage that is sent gradients, or works out those of weights from what came to them."""
    is_sent = any(run.stop < spec.num_layers for run in runs)
    return SYMBOLS_BYTES if plan.pp > 1 and (is_sent or plan.schedule == "zero_bubble") else 0
