"""`fold` combines the tensors of several ranks in a fixed order, a balanced tree: ((p_0 · p_1) · (p_2 · p_3)) · …

Floating-point addition is not associative, so the order decides the bits. Every rank that folds the same pieces has the
same bits. With 2^k ranks a sum of equal parts has the bits of one process that adds in such a tree itself. 16-bit
floats are added and multiplied in float32, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tllm.core.errors import ConfigError, nearest

NARROW = (torch.float16, torch.bfloat16)
COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
BITWISE = ("and", "or", "xor")


def check_op(op: str, dtype: torch.dtype) -> None:
    """ConfigError unless numbers of this dtype can be combined by this operation."""
    if op not in COMBINE:
        raise ConfigError(f"ranks cannot be combined by {op!r}", nearest(op, COMBINE))
    if op in BITWISE and dtype.is_floating_point:
        raise ConfigError(
            f"{str(dtype).removeprefix('torch.')} numbers cannot be combined by {op!r}", "whole numbers can"
        )
    if op == "mean" and not dtype.is_floating_point:
        raise ConfigError(f"{str(dtype).removeprefix('torch.')} numbers have no mean of their own dtype", "sum them")


def fold(pieces: list[torch.Tensor], out: torch.Tensor, op: str = "sum") -> None:
    """out = all pieces combined by `op`; `out` is one of at least two pieces, and the others may be overwritten."""
    if op == "sum" and out.dtype not in NARROW and len(pieces) == 2:
        torch.add(*pieces, out=out)
        return
    left, right = halves(pieces)
    widen = widens(out.dtype, op)
    if op == "mean":
        torch.div(_combined(pieces, op, widen), len(pieces), out=out)
    else:
        COMBINE[op](_combined(left, op, widen), _combined(right, op, widen), out=out)


def widened(x: torch.Tensor, op: str) -> torch.Tensor:
    """`x` as partial results of it travel: in float32 if it has 16-bit floats to be added, else `x` itself."""
    return x.float() if widens(x.dtype, op) else x


def finish_reduction(total: torch.Tensor, x: torch.Tensor, op: str, ranks: int) -> None:
    """x = the result of all `ranks` in `total`: divided for a mean, and rounded to the dtype of `x`."""
    if op == "mean":
        torch.div(total, ranks, out=x)
    elif total is not x:
        x.copy_(total)


def widens(dtype: torch.dtype, op: str) -> bool:
    """Whether partial results are kept in float32, because the numbers have only 16 bits."""
    return dtype in NARROW and op not in ("max", "min")


def left_subtree_size(count: int) -> int:
    """How many of `count` > 1 pieces are in the left subtree: the greatest power of two less than `count`."""
    return 1 << (count - 1).bit_length() - 1


def halves(pieces: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The pieces of the left and of the right subtree."""
    left = left_subtree_size(len(pieces))
    return pieces[:left], pieces[left:]


def _combined(pieces: list[torch.Tensor], op: str, widen: bool) -> torch.Tensor:
    """A subtree's pieces combined, in the memory of the first; in float32, elsewhere, if `widen` and more than one."""
    if len(pieces) == 1:
        return pieces[0]
    left, right = halves(pieces)
    total = _combined(left, op, widen)
    total = total.float() if widen else total
    return COMBINE[op](total, _combined(right, op, widen), out=total)
