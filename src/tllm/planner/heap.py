"""What a training process holds beside tensors that live: freed pieces of the C library's heap, and what torch loads.

Measured with glibc as workers set it (`engine.memory`) and one thread, over shapes and plans of `benchmarks/memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan

UNFIT = 0.3
"""Of what passes take in the heap: freed pieces between those that live, too small for what comes next."""

LARGEST_KEPT = 32 * 2**20
"""Bytes; longer pieces are mapped by themselves, and leave no hole when they are freed."""

SYMBOLS_BYTES = 36 * 2**20
"""sympy, which torch imports as soon as a backward pass is given a gradient: memory of a process with and without."""


def heap_bytes(passes: int, pieces: Sequence[int]) -> int:
    """Freed memory that the heap keeps at the most, beside `passes` bytes of activations and of what works on them.

    Each of `pieces`, the sizes of the largest that come and go, leaves a hole once something smaller lies in it.
    """
    return int(UNFIT * passes) + sum(pieces)


def largest_kept(sizes: Iterable[int]) -> int:
    """The largest that is not mapped, and so leaves a hole."""
    return max((size for size in sizes if size <= LARGEST_KEPT), default=0)


def symbols_bytes(spec: ModelSpec, plan: Plan, runs: tuple[range, ...]) -> int:
    """Of a stage that is sent gradients, or works out those of weights from what came to them."""
    is_sent = any(run.stop < spec.num_layers for run in runs)
    return SYMBOLS_BYTES if plan.pp > 1 and (is_sent or plan.schedule == "zero_bubble") else 0
