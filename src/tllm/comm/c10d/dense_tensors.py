"""Tensors of any strides and dtype as links carry them: one run of elements, of a dtype that frames know."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from tllm.comm.links.frame import CODES, dtype_name
from tllm.core.errors import ConfigError


class DenseTensor:
    """`run` is a tensor's elements in one row, in its own memory where that is contiguous; else, if it is to be
    `written`, they are copied back at the end. Dtypes that no frame knows are bytes."""

    def __init__(self, x: Tensor, written: bool = True) -> None:
        self._x, self._written = x.detach(), written
        self._near = self._x.contiguous()
        run = self._near.view(-1)
        self.run = run if run.dtype in CODES else run.view(torch.uint8)

    def __enter__(self) -> DenseTensor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._written and self._near is not self._x:
            self._x.copy_(self._near)


def as_numbers(x: Tensor, op: str) -> Tensor:
    """`x` as numbers that ranks can combine by `op`: complex ones, to be summed, as pairs. ConfigError for others."""
    y = x.detach()
    if y.is_complex() and op in ("sum", "mean"):
        y = torch.view_as_real(y)
    if y.dtype not in CODES:
        known = ", ".join(map(dtype_name, CODES))
        raise ConfigError(f"ranks cannot combine {dtype_name(x.dtype)} tensors by {op!r}", f"these they can: {known}")
    return y


def check_dense(x: Tensor) -> None:
    """ConfigError for a tensor that is not in this machine's memory, number by number."""
    if x.device.type != "cpu":
        raise ConfigError(
            f"a tensor is on {x.device}, and backend 'tllm' takes those on the CPU",
            "move it with .cpu(), or make a second group for such, as by dist.new_group(backend='nccl')",
        )
    if x.layout != torch.strided:
        raise ConfigError(f"a tensor is {x.layout}, and backend 'tllm' takes dense ones", "make it so with .to_dense()")
