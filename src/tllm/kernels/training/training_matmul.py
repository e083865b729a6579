"""x W^T with gradients: each pass as torch makes it, or in the way that is faster here.

Of weights of 16 bits the other way is float32, of those of float32 our own kernel (`ordered_products`).

A processor without instructions for bfloat16 multiplies float32 several to forty times as fast
(docs/log/training.md); one with them is fastest without a detour. So each machine times both, once for each kind of
product, and keeps what it found (`kernels/autotune.py`). A product in float32 is rounded to the weight's dtype once, at
its end, as torch's own are.

Where torch computes by one thread, products are those of `reproducible`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import BestTimes, Choice
from tllm.kernels.library import is_torch_held, library
from tllm.kernels.training.ordered_products import ordered_input_gradient, ordered_matmul, ordered_weight_gradient
from tllm.kernels.training.reproducible import Passes, reproducible_passes

MARGIN = 1.5
"""So many times as fast must float32 be to be taken: what is nearly equal is not left to the noise of a machine."""

REPEATS = 12
"""Of which the first, in which libraries set themselves up, does not count. So many that others on this machine
interrupt not all of them: a product takes a millisecond or two where neither way is hopeless."""

HOPELESS = 3.0
LONG = 0.05
"""A way that has taken so many times the other's best time, and so many seconds, is not timed again. In less time it
may only have been interrupted."""

ROWS = 128
WIDTH = 1024
"""Rows, and the most outputs and columns, of what is timed: a tenth of a second where a processor is at its slowest."""

ORDERED_ROWS = 256
"""Rows of what is timed in float32, of which a step has some hundreds and more."""

SMALLEST = 2**16
"""Elements. Smaller matrices are left to torch: what they take is calls, not arithmetic."""

PASSES = ("forward", "gradient of inputs", "gradient of weights")

WIDE = "float32"
"""The name of the way of 16 bits that computes in it."""

KERNEL, KERNEL_MARGIN = "kernel", 1.1
"""The name of our kernel's way of float32, and so many times as fast it must be. It shares parts among threads as they
come to them, as torch does not."""

TRAINED_IN_16_BITS = (torch.bfloat16, torch.float16)

Run = Callable[[], Tensor]

ORDERED = (ordered_matmul, ordered_input_gradient, ordered_weight_gradient)
"""PASSES by the kernel."""


class TrainedKind(NamedTuple):
    """Weights that are alike."""

    outputs: int
    columns: int
    dtype: torch.dtype
    threads: int


class PassKind(NamedTuple):
    """One of PASSES with weights that are alike."""

    outputs: int
    columns: int
    dtype: torch.dtype
    threads: int
    computes: str


Widened = frozenset[str]
"""Those of PASSES that are computed in float32, or if that is the weights' own, by the kernel."""

NONE: Widened = frozenset()

choices: dict[TrainedKind, Widened] = {}
"""What products of weights are computed by now; of kinds that are not there all is left to torch."""

measured = Autotuned[PassKind]("product of training")
_CHOOSING = threading.Lock()


def choose_products(weights: Iterable[Tensor], fixed: bool = False) -> dict[TrainedKind, Widened]:
    """Choose for all matrices among these weights, which need no values yet; `fixed` leaves all to torch."""
    kinds = {_kind(weight) for weight in weights if _has_choice(weight)}
    with _CHOOSING:
        for kind in sorted(kinds, key=str):
            choices[kind] = NONE if fixed else _widened(kind)
    return {kind: choices[kind] for kind in kinds}


def training_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T in x's dtype, with gradients."""
    passes = _passes(x_TD, weight_FD)
    if passes is None:
        return F.linear(x_TD, weight_FD)
    y_TF = _OfInputs.apply(x_TD, weight_FD.detach(), passes)  # type: ignore[no-untyped-call]
    if not weight_FD.requires_grad:
        return y_TF  # type: ignore[no-any-return]
    nothing_TF = _OfWeight.apply(weight_FD, x_TD.detach(), y_TF.shape, passes)  # type: ignore[no-untyped-call]
    return _Both.apply(y_TF, nothing_TF)  # type: ignore[no-any-return, no-untyped-call]


def _passes(x_TD: Tensor, weight_FD: Tensor) -> Passes | None:
    """How this product is made; None: as torch makes it."""
    if not x_TD.is_cpu or x_TD.dtype != weight_FD.dtype:
        return None
    if is_torch_held():
        return reproducible_passes(x_TD.dtype)
    widened = choices.get(_kind(weight_FD), NONE)
    if not widened:
        return None
    ways = (forward_product, input_gradient, weight_gradient)
    if weight_FD.dtype == torch.float32:
        own = [partial(way, wide=False) for way in ways]
        return Passes(
            *(ordered if name in widened else way for name, ordered, way in zip(PASSES, ORDERED, own, strict=True))
        )
    return Passes(*(partial(way, wide=name in widened) for way, name in zip(ways, PASSES, strict=True)))


# The gradients of x and of W are of a node each: where a backward pass goes in halves (`split_backward`), autograd runs
# the nodes on the way to what is asked for, but each of them whole.


class _OfInputs(torch.autograd.Function):
    """The product, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_FD: Tensor, passes: Passes) -> Tensor:
        ctx.save_for_backward(weight_FD)
        ctx.passes = passes
        return passes.forward(x_TD, weight_FD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, None, None]:
        (weight_FD,) = ctx.saved_tensors
        return ctx.passes.of_inputs(gradient_TF, weight_FD), None, None


class _OfWeight(torch.autograd.Function):
    """Zeros of the product's shape, which take no memory, with the gradient that W has from the product."""

    @staticmethod
    def forward(ctx: Any, weight_FD: Tensor, x_TD: Tensor, shape: torch.Size, passes: Passes) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.passes = passes
        return weight_FD.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, None, None, None]:
        (x_TD,) = ctx.saved_tensors
        return ctx.passes.of_weight(gradient_TF, x_TD), None, None, None


class _Both(torch.autograd.Function):
    """The sum of the two, which is the first, with the gradient of the product for each."""

    @staticmethod
    def forward(ctx: Any, y_TF: Tensor, nothing_TF: Tensor) -> Tensor:
        return y_TF.view_as(y_TF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_TF, gradient_TF


def forward_product(x_TD: Tensor, weight_FD: Tensor, wide: bool) -> Tensor:
    """x W^T."""
    return F.linear(x_TD.float(), weight_FD.float()).to(x_TD.dtype) if wide else F.linear(x_TD, weight_FD)


def input_gradient(gradient_TF: Tensor, weight_FD: Tensor, wide: bool) -> Tensor:
    """The gradient of x."""
    if wide:
        return torch.matmul(gradient_TF.float(), weight_FD.float()).to(gradient_TF.dtype)
    return torch.matmul(gradient_TF, weight_FD)


def weight_gradient(gradient_TF: Tensor, x_TD: Tensor, wide: bool) -> Tensor:
    """The gradient of W."""
    gradient_FT, x_TD = gradient_TF.flatten(0, -2).t(), x_TD.flatten(0, -2)
    return torch.mm(gradient_FT.float(), x_TD.float()).to(x_TD.dtype) if wide else torch.mm(gradient_FT, x_TD)


def _widened(kind: TrainedKind) -> Widened:
    found = {name: choose_pass(PassKind(*kind, name)) for name in PASSES}
    return frozenset(name for name, choice in found.items() if choice.name == _other_way(kind.dtype))


def choose_pass(kind: PassKind) -> Choice:
    """What is known of this pass, measured if nothing is."""
    return measured.choose(kind, (_other_way(kind.dtype), in_own(kind.dtype)), partial(measure, kind))


def _other_way(dtype: torch.dtype) -> str:
    return KERNEL if dtype == torch.float32 else WIDE


def in_own(dtype: torch.dtype) -> str:
    """The name of the way that computes in the weight's own dtype."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def measure(kind: PassKind) -> Choice:
    """Time both ways of a pass."""
    rows = ORDERED_ROWS if kind.dtype == torch.float32 else ROWS
    x_TD, weight_FD, gradient_TF = (
        torch.full(shape, 0.5, dtype=kind.dtype)
        for shape in ((rows, kind.columns), (kind.outputs, kind.columns), (rows, kind.outputs))
    )
    ways = (
        partial(forward_product, x_TD, weight_FD),
        partial(input_gradient, gradient_TF, weight_FD),
        partial(weight_gradient, gradient_TF, x_TD),
    )
    way, ordered = ways[PASSES.index(kind.computes)], ORDERED[PASSES.index(kind.computes)]
    if kind.dtype == torch.float32:
        return faster(KERNEL, partial(ordered, *way.args), KERNEL_MARGIN, partial(way, False), kind.dtype)
    return wide_or_own(partial(way, True), partial(way, False), kind.dtype)


def wide_or_own(wide: Run, own: Run, dtype: torch.dtype) -> Choice:
    """float32, if its best time, times the margin, is less than that of the dtype; timed by turns."""
    return faster(WIDE, wide, MARGIN, own, dtype)


def faster(name_of_other: str, other: Run, margin: float, own: Run, dtype: torch.dtype) -> Choice:
    """The other way, if its best time, times the margin, is less than that of torch's in the dtype; timed by turns."""
    best, ways = BestTimes(), {name_of_other: other, in_own(dtype): own}
    for repeat in range(REPEATS):
        for name, run in ways.items():
            taken = best.seconds[name] if repeat > 1 else 0.0
            if taken > LONG and taken > HOPELESS * min(best.seconds.values()):
                continue
            best.run(name, run, replaces=repeat == 1)
    if best.seconds[name_of_other] * margin < best.seconds[in_own(dtype)]:
        return best.choice(name_of_other, margin)
    return best.choice(in_own(dtype), 1 / margin)


def _has_choice(weight: Tensor) -> bool:
    two_ways = weight.dtype in TRAINED_IN_16_BITS or (weight.dtype == torch.float32 and library() is not None)
    here = two_ways and weight.device.type in ("cpu", "meta")  # ZeRO-3's have no values
    return here and weight.ndim >= 2 and weight.shape[-2:].numel() >= SMALLEST


def _kind(weight: Tensor) -> TrainedKind:
    """Longer sides than WIDTH count as it."""
    outputs, columns = weight.shape[-2:]
    return TrainedKind(min(outputs, WIDTH), min(columns, WIDTH), weight.dtype, torch.get_num_threads())
