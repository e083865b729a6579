"""The small operations of a layer in one pass over memory each, where torch would take several.

`row_operations(x)` has them for where x lies: by kernels in float32, bfloat16 or float16, and by torch's steps where
there are none and gradients are wanted. With gradients they keep what they take in, and what a backward pass can work
out of it is not kept. Each is equal to torch's steps within rounding; on processors they have the same bits on every
one, whatever the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.gpu_kernels import gpu_kernels
from tllm.kernels.library import DTYPE_NUMBERS, FLOAT8, LANES, CacheRowsArguments, Library, library

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Those that `gated` has, by the numbers that csrc/row_operations.c gives them."""

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""The same by torch."""

SUMMED_ROWS = 64
"""Rows of a part of the gradient of a norm's weight, as in csrc/trained_rows.c."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the rows that kernels take."""


class RowOperations(Protocol):
    """What is done to the rows of a tensor."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        """w x / sqrt(mean(x^2) + eps) over the last dim; (1 + w) in w's place if it `adds_one`."""

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        """x + y, and what `rms_norm` makes of that."""

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        """act(gate) * up, for gate and up side by side in rows [T, 2 F]."""

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        """gate sigmoid(alpha gate) (up + 1), for gates and ups that take turns in rows [T, 2 F].

        The gate is at most `limit`, and up within it.
        """

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn each head's halves (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin), in x's own memory.

        cos and sin [T, 1, dim] in x's dtype, the first half of sin negative. Where the heads of a token do not follow
        one another, or gradients are wanted, it happens in a copy.
        """

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`rotate_in_place` of queries and keys of the same tokens."""


def clamped_swiglu_in_steps(gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
    """`RowOperations.clamped_swiglu` by torch, where none is there, or gradients are wanted."""
    gate_TF, up_TF = gate_up_TF[:, 0::2].clamp(max=limit), gate_up_TF[:, 1::2].clamp(-limit, limit)
    return gate_TF * torch.sigmoid(gate_TF * alpha) * (up_TF + 1)


def gated_in_steps(gate_up_TF: Tensor, activation: str) -> Tensor:
    """`RowOperations.gated` by torch."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return STEPS[activation](gate_TF) * up_TF


def rms_norm_in_steps(x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
    """`RowOperations.rms_norm` by torch; one that `adds_one` is rounded at its end alone."""
    if adds_one:
        return F.rms_norm(widen(x), weight.shape, 1.0 + widen(weight), eps).to(x.dtype)
    return normed(x, eps).to(x.dtype) * weight


def normed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, in float32 at least."""
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def widen(x: Tensor) -> Tensor:
    """At least float32, so that norms of 16-bit values are not themselves rounded."""
    return x if x.dtype == torch.float64 else x.float()


def rotated_in_steps(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`RowOperations.rotate_in_place` by torch, in other memory."""
    dim = cos.shape[-1]
    x = x_TNH if dim == x_TNH.shape[-1] else x_TNH[..., :dim]
    rotated = torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)
    return rotated if dim == x_TNH.shape[-1] else torch.cat((rotated, x_TNH[..., dim:]), dim=-1)


def row_operations(x: Tensor) -> RowOperations | None:
    """What there is for x and where it lies; None: torch's own steps."""
    gpu = None if x.is_cpu else gpu_kernels(x.device.type)
    if gpu is not None and x.dtype in DTYPES:
        fused: RowOperations = gpu.trained_rows if torch.is_grad_enabled() else gpu.row_operations
        return fused
    if torch.is_grad_enabled():
        return TRAINED
    kernels = kernels_for(x)
    return None if kernels is None else ProcessorRowOperations(kernels)


def kernels_for(x: Tensor) -> Library | None:
    """The processor's kernels, if they can be used for x."""
    if torch.is_grad_enabled() or not x.is_cpu or x.dtype not in DTYPES:
        return None
    return library()


class ProcessorRowOperations:
    """`RowOperations` by csrc/row_operations.c."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        x = x.contiguous()
        y, width = torch.empty_like(x), x.shape[-1]
        self._kernels.rows.rms_norm(
            x.data_ptr(),
            DTYPE_NUMBERS[x.dtype],
            x.numel() // width,
            width,
            weight.data_ptr(),
            DTYPE_NUMBERS[weight.dtype],
            eps,
            adds_one,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, self.rms_norm(x, weight, eps, adds_one)

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return _joined(self._kernels.rows.gated, gate_up_TF, ACTIVATIONS[activation])

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        return _joined(self._kernels.experts.clamped_swiglu, gate_up_TF, limit, alpha)

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, width = x_TNH.shape
        if x_TNH.stride()[1:] != (width, 1):
            x_TNH = x_TNH.contiguous()
        self._kernels.rows.rotate(
            x_TNH.data_ptr(),
            DTYPE_NUMBERS[x_TNH.dtype],
            rows,
            x_TNH.stride(0),
            heads,
            width,
            cos.shape[-1],
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return x_TNH

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate_in_place(q_TNH, cos, sin), self.rotate_in_place(k_TKH, cos, sin)


class LeanRowOperations:
    """`RowOperations` with gradients, on any device: by the processor's kernels, else by torch's steps, which the
    backward pass then takes once more."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        return _Normed.apply(x, weight, eps, adds_one)  # type: ignore[no-any-return, no-untyped-call]

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, self.rms_norm(x, weight, eps, adds_one)

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return _Gated.apply(gate_up_TF, activation)  # type: ignore[no-any-return, no-untyped-call]

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        return clamped_swiglu_in_steps(gate_up_TF, limit, alpha)

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Not in place."""
        return _Rotated.apply(x_TNH, cos, sin)  # type: ignore[no-any-return, no-untyped-call]

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate_in_place(q_TNH, cos, sin), self.rotate_in_place(k_TKH, cos, sin)


TRAINED = LeanRowOperations()


class _Gated(torch.autograd.Function):
    """act(gate) * up. It keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        ctx.activation, kernels = activation, kernels_for(gate_up_TF)
        if kernels is None:
            return gated_in_steps(gate_up_TF, activation)
        return ProcessorRowOperations(kernels).gated(gate_up_TF, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_TF,), kernels = ctx.saved_tensors, kernels_for(gradient_TF)
        if kernels is None:
            steps = partial(gated_in_steps, activation=ctx.activation)
            return gradients_in_steps(steps, gradient_TF, gate_up_TF)[0], None
        gate_up_TF, gradient_TF = gate_up_TF.contiguous(), gradient_TF.contiguous()
        of_gate_up_TF = torch.empty_like(gate_up_TF)
        kernels.rows.gated_backward(
            gate_up_TF.data_ptr(),
            DTYPE_NUMBERS[gate_up_TF.dtype],
            *gradient_TF.shape,
            ACTIVATIONS[ctx.activation],
            gradient_TF.data_ptr(),
            of_gate_up_TF.data_ptr(),
            torch.get_num_threads(),
        )
        return of_gate_up_TF, None


class _Normed(torch.autograd.Function):
    """w x s for the scale s = 1 / sqrt(mean(x^2) + eps) of each row. It keeps w, x and s: x as it is given, which may
    lie in a product that others keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        kernels, width, ctx.how = kernels_for(x), x.shape[-1], (eps, adds_one)
        kept = weight.clone()  # with ZeRO-3 the weight has no memory any more when its own gradient is worked out late
        if kernels is None:
            ctx.save_for_backward(x, kept)
            return rms_norm_in_steps(x, weight, eps, adds_one)
        scales = torch.empty(x.numel() // width)
        ctx.save_for_backward(x, kept, scales)
        x = x.contiguous()
        y = torch.empty_like(x)
        kernels.rows.rms_norm_kept(
            x.data_ptr(),
            DTYPE_NUMBERS[x.dtype],
            len(scales),
            width,
            weight.data_ptr(),
            DTYPE_NUMBERS[weight.dtype],
            eps,
            adds_one,
            y.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        eps, adds_one = ctx.how
        if not scales:
            steps = partial(rms_norm_in_steps, eps=eps, adds_one=adds_one)
            return *gradients_in_steps(steps, gradient, x, weight), None, None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return _of_norm(gradient, x, weight, scales[0], adds_one, of_weight), of_weight, None, None


def _of_norm(
    gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor, adds_one: bool, of_weight: Tensor | None
) -> Tensor:
    """The gradient of x; that of the weight is written to `of_weight`, if it is wanted."""
    kernels = kernels_for(x)
    assert kernels is not None, "they made the scales"
    x, gradient, (rows, width) = x.contiguous(), gradient.contiguous(), (len(scales), x.shape[-1])
    of_x = torch.empty_like(x)
    parts = None if of_weight is None else torch.empty(-(-rows // SUMMED_ROWS), -(-width // LANES) * LANES)
    kernels.rows.rms_norm_backward(
        x.data_ptr(),
        DTYPE_NUMBERS[x.dtype],
        rows,
        width,
        weight.data_ptr(),
        DTYPE_NUMBERS[weight.dtype],
        adds_one,
        scales.data_ptr(),
        gradient.data_ptr(),
        of_x.data_ptr(),
        None if of_weight is None else of_weight.data_ptr(),
        None if parts is None else parts.data_ptr(),
        torch.get_num_threads(),
    )
    return of_x


class _Rotated(torch.autograd.Function):
    """Heads that are turned. Their gradient is turned back: the same with the halves of the sines exchanged."""

    @staticmethod
    def forward(ctx: Any, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_TNH, cos, sin, is_back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TNH: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient_TNH, cos, sin, is_back=True), None, None


def _turned(x_TNH: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    kernels, (rows, heads, width) = kernels_for(x_TNH), x_TNH.shape
    if kernels is None:
        return rotated_in_steps(x_TNH, cos, sin.roll(sin.shape[-1] // 2, -1) if is_back else sin)
    if x_TNH.stride()[1:] != (width, 1):
        x_TNH = x_TNH.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y_TNH = torch.empty(rows, heads, width, dtype=x_TNH.dtype)
    kernels.rows.rotate_rows(
        x_TNH.data_ptr(),
        DTYPE_NUMBERS[x_TNH.dtype],
        rows,
        x_TNH.stride(0),
        heads,
        width,
        cos.shape[-1],
        cos.data_ptr(),
        sin.data_ptr(),
        is_back,
        y_TNH.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TNH


def gradients_in_steps(steps: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Those of what torch's steps took in, by taking them once more."""
    with torch.enable_grad():
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        y = steps(*inputs)
    return torch.autograd.grad(y, inputs, gradient)


def _joined(function: Callable[..., None], gate_up_TF: Tensor, *own: float) -> Tensor:
    """What a function of the kernels makes of gates and ups, [T, F]; `own` are its own arguments."""
    gate_up_TF = gate_up_TF.contiguous()
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype)
    where = gate_up_TF.data_ptr(), DTYPE_NUMBERS[gate_up_TF.dtype], rows, width
    function(*where, *own, y_TF.data_ptr(), torch.get_num_threads())
    return y_TF


def write_codes(
    kernels: Library, x_TKH: Tensor, places_T: Tensor, codes_KSH: Tensor, scales_KS1: Tensor | None
) -> None:
    """Round each head's row of x to codes and a scale, and write them to the slots `places_T`: int8, or e4m3 where
    codes are uint8. engine/compute/cache_codes.py says how. Slots of x's own dtype get the row as it is."""
    heads, slots, width = codes_KSH.shape
    if x_TKH.stride()[1:] != (width, 1):
        x_TKH = x_TKH.contiguous()
    rows = CacheRowsArguments(
        x=x_TKH.data_ptr(),
        places=places_T.data_ptr(),
        codes=codes_KSH.data_ptr(),
        scales=0 if scales_KS1 is None else scales_KS1.data_ptr(),
        rows=len(places_T),
        stride=x_TKH.stride(0),
        heads=heads,
        width=width,
        slots=slots,
        dtype=DTYPE_NUMBERS[x_TKH.dtype],
        coding=FLOAT8 if codes_KSH.dtype == torch.uint8 else DTYPE_NUMBERS[codes_KSH.dtype],
    )
    kernels.cache.write_codes(rows, torch.get_num_threads())
