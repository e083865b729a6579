"""x W^T for few rows on a GPU by the product that is fastest there for this shape: measured, never assumed.

A product of few rows takes as long as reading W does. torch's own reads a wide matrix at the memory's rate and a small
one at two thirds of it; ours the other way round (docs/log/serving.md). So the first product of each kind times both.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.fastest import next_power_of_two

log = logging.getLogger("tllm.kernels")

MEASURED_ROWS = 16
"""For more rows torch's own is taken: more of them are bound by arithmetic."""

MEASURED_BYTES = 4 * 2**20
"""Smaller weights take less than starting a kernel does: torch's own is taken."""

REPEATS = 5
FLUSH_BYTES = 1 << 28
"""What is written between two measurements, so that no cache holds the weight."""


class GpuProductKind(NamedTuple):
    """Products that are alike: `rows` is the largest number of rows that counts as the same."""

    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype
    device: torch.device


class GpuProducts:
    """The products of one process, and what was found to be fastest."""

    def __init__(self) -> None:
        self.known: dict[GpuProductKind, str] = {}

    def matmul(self, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        """x W^T without gradients, in x's dtype."""
        rows = len(x_TD)
        if not 0 < rows <= MEASURED_ROWS or weight_FD.nbytes < MEASURED_BYTES or not _takes(x_TD, weight_FD):
            return F.linear(x_TD, weight_FD)
        outputs, columns = weight_FD.shape
        kind = GpuProductKind(next_power_of_two(rows), outputs, columns, weight_FD.dtype, weight_FD.device)
        names, run = tuple(CANDIDATES), lambda name: CANDIDATES[name](x_TD, weight_FD)
        return run(known_fastest(self.known, kind, names, run))


def _takes(x_TD: Tensor, weight_FD: Tensor) -> bool:
    """Whether our kernel has this product: in few enough bits, of rows, and with each output's weights together."""
    return x_TD.dtype != torch.float64 and x_TD.dim() == 2 and weight_FD.stride(1) == 1


def skinny_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T in x's dtype, summed in float32: each program reads some rows of W, once and in order."""
    x_TD = x_TD.contiguous()
    (rows, columns), outputs = x_TD.shape, len(weight_FD)
    y_TF = torch.empty(rows, outputs, dtype=x_TD.dtype, device=x_TD.device)
    block, stride = (8 if outputs < 16384 else 16), weight_FD.stride(0)
    _products[(triton.cdiv(outputs, block), rows)](
        x_TD, weight_FD, y_TF, outputs, columns, stride, OUTPUTS=block, COLUMNS=512, num_warps=4
    )
    return y_TF


CANDIDATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"linear": F.linear, "skinny": skinny_matmul}


class KindOnDevice(Protocol):
    """Products that are alike, on one device."""

    @property
    def device(self) -> torch.device: ...


Kind = TypeVar("Kind", bound=KindOnDevice)


def known_fastest(known: dict[Kind, str], kind: Kind, names: Sequence[str], run: Callable[[str], object]) -> str:
    """The name that runs products of a kind fastest, measured the first time and kept; the first where nothing can be
    measured."""
    name = known.get(kind)
    if name is None:
        # Nothing can be timed while a graph is recorded, as on CUDA alone.
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return names[0]
        name = known[kind] = _fastest(names, run, kind.device)
        log.debug("product of %s: %s", kind, name)
    return name


def _fastest(names: Sequence[str], run: Callable[[str], object], device: torch.device) -> str:
    """The name whose best time is least, in turn, each time with nothing in the caches; the first where the device has
    no memory to measure with."""
    if torch.get_device_module(device).mem_get_info(device)[0] < 2 * FLUSH_BYTES:
        return names[0]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    best = dict.fromkeys(names, float("inf"))
    for _ in range(1 + REPEATS):  # the first compiles
        for name in names:
            flush.zero_()
            best[name] = min(best[name], _seconds(functools.partial(run, name), device))
    return min(best, key=lambda name: best[name])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """By the device's own clock."""
    module = torch.get_device_module(device)
    start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@triton.jit
def _products(x, weight, y, outputs, columns, stride, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some outputs of one row of x."""
    f, d = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    t = tl.program_id(1).to(tl.int64)
    sums = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    row = weight + f.to(tl.int64)[:, None] * stride
    for at in range(0, columns, COLUMNS):
        is_here = at + d < columns
        w = tl.load(row + (at + d)[None, :], mask=(f < outputs)[:, None] & is_here[None, :], other=0.0)
        numbers = tl.load(x + t * columns + at + d, mask=is_here, other=0.0)
        sums += w.to(tl.float32) * numbers.to(tl.float32)[None, :]
    tl.store(y + t * outputs + f, tl.sum(sums, 1).to(y.dtype.element_ty), mask=f < outputs)
