"""The collectives inside a model, with their gradients.

Two pairs, each the other's mirror: Megatron-LM's f and g (1909.08053, section 3) where every rank holds all rows, and
those of sequence parallelism (2205.05198, section 4.2) where each holds some. A group of one does nothing, and where
no gradient is wanted nothing is recorded and sums are made in place. A gradient is never changed in place: autograd
may hand the same one to several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.comm.links.shared_memory import meet_in_memory
from tllm.kernels.library import library
from tllm.kernels.recording.host_steps import host_step
from tllm.kernels.recording.shared_sums import SharedSums


def sum_in_memory(group: Group, hosts: Sequence[str], is_able: bool, seconds: float) -> str:
    """Let sums of a group whose ranks share a machine go through its memory, and say in one line what is so.

    All ranks call it; `hosts` names each one's machine, `is_able` says whether this one's tensors are in memory, and
    `seconds` is what waiting for another rank may take. Where one cannot, sums go by links as before. "" for groups
    that are on several machines, or of one rank.
    """
    if group.size == 1 or len(set(hosts)) > 1:
        return ""
    kernels = library()
    memory = meet_in_memory(group.rank, group.send, group.recv, is_able and kernels is not None, seconds)
    if memory is None or kernels is None:
        return f"{group.name}: sums by links, as its ranks share no memory"
    group.memory_sums = SharedSums(kernels, memory)
    return f"{group.name}: sums in memory that {group.size} ranks share"


def copy_to(x: Tensor, tp: Group) -> Tensor:
    """x itself, which all ranks have and each uses for its part of the work; backward: the sum of their gradients."""
    if tp.size == 1 or not x.requires_grad:
        return x
    return _Copy.apply(x, tp)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from(x: Tensor, tp: Group) -> Tensor:
    """The sum of x over the ranks; backward: the gradient as it is, which is the same on every rank."""
    if tp.size == 1:
        return x
    if x.requires_grad:
        return _Reduce.apply(x, tp)  # type: ignore[no-any-return, no-untyped-call]
    in_memory = tp.memory_sums
    return host_step(tp.all_reduce if in_memory is None or not in_memory.takes(x) else in_memory, x)


def gather_rows(x: Tensor, tp: Group, counts: Sequence[int]) -> Tensor:
    """The ranks' rows, `counts[p]` of rank p, one after another; backward: this rank's rows of the summed gradients."""
    if tp.size == 1:
        return x
    if x.requires_grad:
        return _Gather.apply(x, tp, counts)  # type: ignore[no-any-return, no-untyped-call]
    return gathered(x, tp, counts)


def scatter_rows(x: Tensor, tp: Group, counts: Sequence[int]) -> Tensor:
    """This rank's `counts[tp.rank]` rows of the sum over ranks; backward: the ranks' gradients one after another."""
    if tp.size == 1:
        return x
    if x.requires_grad:
        return _Scatter.apply(x, tp, counts)  # type: ignore[no-any-return, no-untyped-call]
    return scattered(x, tp, counts)


def gathered(x: Tensor, group: Group, counts: Sequence[int], dim: int = 0) -> Tensor:
    """The ranks' parts, `counts[p]` of rank p along `dim`, put together; without a gradient."""
    shapes = [(*x.shape[:dim], count, *x.shape[dim + 1 :]) for count in counts]
    return torch.cat(group.all_gather(x.detach(), shapes), dim)


def scattered(x: Tensor, group: Group, counts: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's part, along `dim`, of the sum of what the ranks have; without a gradient."""
    return group.reduce_scatter(x.detach().transpose(0, dim), counts).transpose(0, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(_fresh(gradient)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        return tp.all_reduce(_fresh(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group, counts: Sequence[int]) -> Tensor:
        ctx.tp, ctx.counts = tp, counts
        return gathered(x, tp, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scattered(gradient, ctx.tp, ctx.counts), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group, counts: Sequence[int]) -> Tensor:
        ctx.tp, ctx.counts = tp, counts
        return scattered(x, tp, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, ctx.tp, ctx.counts), None, None


def _fresh(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
