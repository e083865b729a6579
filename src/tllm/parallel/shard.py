"""`Shard`: how a parameter is cut, declared where the parameter is made, and read by loader, check and export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Ranges = tuple[tuple[int, int], ...]
Gradient = Literal["whole", "partial"]


@dataclass(frozen=True)
class ShardPiece:
    """One block of a tensor of the checkpoint and the place in this rank's parameter that holds it.

    `source` and `target` give [start, stop) for each dim of the checkpoint's tensor and of the parameter; `()` means
    all of it. A source may lack dims of width 1 that its target has (one expert of a stack of experts).
    """

    name: str
    source: Ranges = ()
    target: Ranges = ()


@dataclass(frozen=True)
class Shard:
    """The pieces that make up one parameter. `replicated`: other ranks may hold the same elements too.

    `gradient` is what each holder of an element computes in a backward pass: all of its gradient ("whole"), or a part
    that counts only when summed with those of the other holders ("partial"; see `parallel.replicated`). `spread`: whole
    experts over ep, so that other replicas hold other elements, and its gradient is summed over edp. `wide`: it is held
    in float32 where the model's weights have 16 bits. `plain`: it is used otherwise than in products, and held as plain
    numbers where the files have few bits.

    `matrices`: of a stack [experts, inputs, outputs], the same as matrices [outputs, inputs] of each expert, under the
    names that the index has for them where they have few bits. Products want them so.
    """

    pieces: tuple[ShardPiece, ...]
    replicated: bool = False
    gradient: Gradient = "whole"
    spread: bool = False
    wide: bool = False
    plain: bool = False
    matrices: tuple[ShardPiece, ...] = ()


def cut_parameter(shape: tuple[int, ...], shard: Shard) -> nn.Parameter:
    """A parameter of this rank's shape with no values yet, carrying its shard."""
    parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def held_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a parameter has in a model of `dtype`."""
    return torch.float32 if shard_of(parameter).wide and dtype.itemsize < 4 else dtype


def shard_of(parameter: torch.Tensor) -> Shard:
    """The shard a parameter was made with."""
    shard = getattr(parameter, "shard", None)
    assert isinstance(shard, Shard), "a parameter was made without a shard"
    return shard
