"""Tensors of any strides and dtype as links need them: flat and contiguous, of a dtype that frames can have."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from tllm.comm.links.frame import CODES, dtype_name
from tllm.core.errors import ConfigError


class DenseTensor:
    """A context manager; `flat` is the tensor's elements in one row, viewed as bytes if no frame can have its dtype.

    It shares the memory of a contiguous tensor. Of another it is a copy, which is written back when the block ends, if
    the tensor is to be `written`.
    """

    def __init__(self, x: Tensor, written: bool = True) -> None:
        self._x, self._written = x.detach(), written
        self._contiguous = self._x.contiguous()
        flat = self._contiguous.view(-1)
        self.flat = flat if flat.dtype in CODES else flat.view(torch.uint8)

    def __enter__(self) -> DenseTensor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._written and self._contiguous is not self._x:
            self._x.copy_(self._contiguous)


def as_numbers(x: Tensor, op: str) -> Tensor:
    """`x` as numbers that ranks can combine by `op`; complex ones to be summed become pairs. ConfigError for others."""
    y = x.detach()
    if y.is_complex() and op in ("sum", "mean"):
        y = torch.view_as_real(y)
    if y.dtype not in CODES:
        known = ", ".join(map(dtype_name, CODES))
        raise ConfigError(f"ranks cannot combine {dtype_name(x.dtype)} tensors by {op!r}", f"these they can: {known}")
    return y


def check_dense(x: Tensor) -> None:
    """ConfigError for a tensor that is not on the CPU or is not dense (strided)."""
    if x.device.type != "cpu":
        raise ConfigError(
            f"a tensor is on {x.device}, and backend 'tllm' takes those on the CPU",
            "move it with .cpu(), or make a second group for such, as by dist.new_group(backend='nccl')",
        )
    if x.layout != torch.strided:
        raise ConfigError(f"a tensor is {x.layout}, and backend 'tllm' takes dense ones", "make it so with .to_dense()")
