"""What a training process holds besides live tensors: freed pieces of the C library's heap, and Python with torch.

The constants were measured with glibc as training ranks set it (`core.memory`) and one thread, over the shapes and
plans of `benchmarks/training/memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

FRAGMENTATION, FRAGMENTATION_16_BIT = 0.25, 0.5
"""Fragmentation, as a share of what passes take in the heap: freed pieces between live ones that are too small for what
comes next. It is larger with 16-bit numbers, which are converted to float32 for a moment again and again."""

LARGEST_KEPT = 4 * 2**20
"""Bytes; the C library maps longer pieces by themselves (mmap), so that they go back when they are freed."""

TRAINER_BYTES = 284 * 2**20
"""Bytes of a worker that trains, before any weight: Python, torch, and what their kernels keep (measured;
docs/log/memory.md)."""

READER_BYTES = 14 * 2**20
"""Bytes that rank 0 has in addition, as it reads the texts."""

SYMBOLS_BYTES = 36 * 2**20
"""Bytes of sympy, which torch imports as soon as a backward pass is given a gradient."""


def heap_bytes(passes: int, pieces: Sequence[int], is_16_bit: bool) -> int:
    """Freed memory that the heap keeps at most, on top of `passes` bytes of activations and of workspace in it.

    Each of `pieces`, the sizes of the largest tensors that come and go, leaves a hole once something smaller lies in
    it."""
    return int((FRAGMENTATION_16_BIT if is_16_bit else FRAGMENTATION) * passes) + sum(pieces)


def heap_part(size: int, piece: int) -> int:
    """Those of `size` bytes, in pieces of about `piece` bytes, that lie in the heap and stay there when freed: all or
    none."""
    return size if piece <= LARGEST_KEPT else 0


def largest_heap_piece(sizes: Iterable[int]) -> int:
    """The largest of `sizes` that lies in the heap, and so leaves a hole."""
    return max((size for size in sizes if size <= LARGEST_KEPT), default=0)


def runtime_bytes(spec: ModelSpec, plan: Plan, rank: int, runs: tuple[range, ...]) -> int:
    """Bytes of the process of a rank that computes, before any weight."""
    return TRAINER_BYTES + READER_BYTES * (rank == 0) + symbols_bytes(spec, plan, runs)


def symbols_bytes(spec: ModelSpec, plan: Plan, runs: tuple[range, ...]) -> int:
    """`SYMBOLS_BYTES` on a stage that is sent gradients, or that computes weight gradients apart (zero bubble)."""
    is_sent = any(run.stop < spec.num_layers for run in runs)
    return SYMBOLS_BYTES if plan.pp > 1 and (is_sent or plan.schedule == "zero_bubble") else 0
