"""`Recorder`: writes down the kernel calls that a computation makes, so that they can be made again without Python.

A layer of few bits makes some sixteen kernel calls for a token, and between them Python and torch make tensors, views
and conversions: thousands of calls, of which none is in a cache any more when the weights have passed through. What
they come to is the same for each token: the same kernels with the same addresses. So they are written down once, and
one call of csrc/recorded_calls.c plays them.

The computation itself does not know. It is run under the recorder, as torch's dispatcher and `library()` let it see all
that is computed: kernels are noted, views and new tensors cost nothing later, and a few operations of torch have
kernels that stand for them, with the same bits. With anything else the computation is `refused`: it has its result, and
no recording.

Sums over ranks by links are no kernels: a recording has parts, and makes the sum between them (`host_steps`). Those in
memory that ranks share are, and may have to wait for other ranks while a recording is played (`shared_sums`).

What a recording reads and writes has to stay where it is. New tensors come from `HeldMemory`; everything else that the
computation is given (weights, caches, its inputs) belongs to the caller, who may change the numbers there.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_float
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tllm.kernels.library import (
    DTYPE_NUMBERS,
    DTYPES,
    SIGNATURES,
    CacheFunctions,
    CallArguments,
    ExpertFunctions,
    Library,
    RowFunctions,
    using,
)
from tllm.kernels.recording.held_memory import HeldMemory
from tllm.kernels.recording.host_steps import Step, taken_by
from tllm.kernels.recording.shared_sums import SharedSums

KERNELS = (
    "quantized_matmul",
    "float_matmul",
    "bfloat16_matmul",
    "rms_norm",
    "gated",
    "rotate",
    "add",
    "scale",
    "convert",
    "copy_rows",
    "paged_attention",
    "write_codes",
    "shared_sum",
)
"""Those that a recording may have, by the numbers that csrc/recorded_calls.c gives them."""

aten = torch.ops.aten

CONSTANTS = {aten.lift_fresh.default, aten.detach_.default}
"""What torch makes a tensor of Python's numbers by: these stay as they are."""


class Part(NamedTuple):
    """Kernel calls in their order, and what is done after them, if anything is."""

    calls: ctypes.Array[CallArguments]
    step: Callable[[], object] | None


class Recording:
    """What was computed, in parts, and what their calls point to. Whoever plays it does so with torch's threads.

    `sums` are those in shared memory, by the first of their arguments.
    """

    def __init__(self, kernels: Library, parts: list[Part], kept: list[object], sums: Mapping[int, SharedSums]) -> None:
        self._play, self._parts, self._kept, self._sums = kernels.recorded.play, parts, kept, sums

    def __len__(self) -> int:
        return sum(len(part.calls) for part in self._parts)

    def play(self) -> None:
        """Make all calls again, and what is done between them."""
        for sums in self._sums.values():
            sums.check()
        for calls, step in self._parts:
            made = self._play(calls, len(calls))
            while made < len(calls):
                self._wait(calls[made])
                made += self._play(ctypes.byref(calls[made]), len(calls) - made)
            if step is not None:
                step()

    def _wait(self, call: CallArguments) -> None:
        """Return when a sum that was given up for now can go on."""
        address, _, count, dtype = call.words[:4]
        self._sums[address].wait(count, dtype)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is computed in the block of `recording`, where there are no gradients.

    `growth`: how many times as many rows a later recording in the same memory may have. `refused` says what cannot be
    recorded, if anything was computed that cannot.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled; else torch loads its compiler for the first call, in over a second."""
        return False

    def __init__(self, kernels: Library, memory: HeldMemory, growth: Fraction = Fraction(1)) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = ""
        self._kernels, self._memory = kernels, memory
        self._new = partial(memory.empty, growth=growth)
        self._calls: list[CallArguments] = []
        self._parts: list[Part] = []
        self._kept: list[object] = [memory]
        self._sums: dict[int, SharedSums] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down what is computed here."""
        with using(self._noting(self._kernels)), taken_by(self._host_step), self:
            yield

    def recorded(self) -> Recording | None:
        """What was written down; None if it was refused."""
        self._end_part(None)
        return None if self.refused else Recording(self._kernels, self._parts, self._kept, self._sums)

    def _end_part(self, step: Callable[[], object] | None) -> None:
        self._parts.append(Part((CallArguments * len(self._calls))(*self._calls), step))
        self._calls = []

    def _host_step(self, step: Step, x: Tensor) -> Tensor:
        """Make a step of the host, and write it down."""
        place = self._memory.place_of(x)
        if place is None:
            self.refused = self.refused or f"{step} of a tensor that may move"
        elif isinstance(step, SharedSums):
            where = step.address, x.data_ptr(), x.numel(), DTYPE_NUMBERS[x.dtype]
            self._calls.append(self._call_of("shared_sum", where))
            self._sums[step.address] = step
        else:
            self._end_part(partial(step, place))
        with _disable_current_modes(), taken_by(None):
            return step(x)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = OPERATIONS.get(operation)
        found = None if own is None else own(self, *args, **(kwargs or {}))
        if found is not None:
            return found
        found = operation(*args, **(kwargs or {}))
        if operation in CONSTANTS:
            self._kept.append(found)
        elif operation._schema.is_mutable or not _are_views(found, args):
            self.refused = self.refused or str(operation)
        return found

    def _empty(
        self, shape: list[int], *, dtype: torch.dtype | None = None, device: Any = None, **layout: Any
    ) -> Tensor | None:
        if device is not None and torch.device(device).type != "cpu":
            return None
        return self._new(shape, dtype or torch.get_default_dtype())

    def _empty_like(self, x: Tensor, **form: Any) -> Tensor | None:
        return self._new(x.shape, x.dtype) if not any(form.values()) and x.is_contiguous() else None

    def _add(self, x: Tensor, y: Any, *, alpha: float = 1) -> Tensor | None:
        """Of rows, or of one row to each."""
        if not isinstance(y, Tensor) or alpha != 1 or x.dtype != y.dtype or x.dtype not in DTYPES:
            return None
        if not (x.dim() == 2 and x.is_contiguous() and y.is_contiguous()) or y.shape not in (x.shape, x.shape[1:]):
            return None
        added = self._new(x.shape, x.dtype)
        stride = 0 if y.dim() == 1 else x.shape[1]
        where = x.data_ptr(), y.data_ptr(), DTYPE_NUMBERS[x.dtype], *x.shape, stride, added.data_ptr()
        self._make("add", self._kernels.recorded.add, *where)
        return added

    def _scale(self, x: Tensor, factor: Any) -> Tensor | None:
        """By a number."""
        if not isinstance(factor, float) or not x.is_contiguous() or x.dtype not in DTYPES:
            return None
        scaled = self._new(x.shape, x.dtype)
        where = x.data_ptr(), DTYPE_NUMBERS[x.dtype], x.numel()
        self._make("scale", self._kernels.recorded.scale, *where, factor, scaled.data_ptr())
        return scaled

    def _to(self, x: Tensor, dtype: torch.dtype, *options: Any, **form: Any) -> Tensor | None:
        if x.dtype == dtype or any((*options, *form.values())) or not x.is_contiguous() or dtype not in DTYPES:
            return None  # the same tensor, or not as there is a kernel for it
        if x.dtype not in (*DTYPES, torch.float64):
            return None
        converted = self._new(x.shape, dtype)
        where = x.data_ptr(), DTYPE_NUMBERS[x.dtype], x.numel(), converted.data_ptr(), DTYPE_NUMBERS[dtype]
        self._make("convert", self._kernels.recorded.convert, *where)
        return converted

    def _contiguous(self, x: Tensor, **form: Any) -> Tensor | None:
        """Of rows that lie apart."""
        if x.is_contiguous() or any(form.values()) or x.dim() < 2 or not x[0].is_contiguous():
            return None
        return self._copied(x, 0, 0)

    def _pad(self, x: Tensor, pad: list[int], mode: str = "constant", value: float | None = None) -> Tensor | None:
        """Of rows, with zeros before and after each."""
        if x.dim() != 2 or not x.is_contiguous() or len(pad) != 2 or min(pad) < 0 or mode != "constant" or value:
            return None
        return self._copied(x, *pad)

    def _copied(self, x: Tensor, before: int, after: int) -> Tensor:
        """Rows that may lie apart, one after another, with so many zeros before and after each."""
        width, size = x[0].numel(), x.dtype.itemsize
        shape = x.shape if before == after == 0 else (len(x), before + width + after)
        together = self._new(shape, x.dtype)
        where = x.data_ptr(), len(x), *(size * number for number in (width, x.stride(0), before, after))
        self._make("copy_rows", self._kernels.recorded.copy_rows, *where, together.data_ptr())
        return together

    def _noting(self, kernels: Library) -> Library:
        """These kernels, of which each call is written down."""
        noting: Any = recordable(kernels)
        k = kernels
        quantized_matmul = partial(self._make, "quantized_matmul", k.quantized.matmul)
        noting.quantized = k.quantized._replace(matmul=quantized_matmul)
        noting.float_matmul = partial(self._make, "float_matmul", k.float_matmul)
        by_tiles = partial(self._make, "bfloat16_matmul", k.tiles.bfloat16_matmul)
        noting.tiles = k.tiles._replace(bfloat16_matmul=by_tiles)
        noting.rows = RowFunctions(**self._all_of(k.rows))
        noting.cache = CacheFunctions(**self._all_of(k.cache))
        noting.experts = ExpertFunctions(**self._all_of(k.experts))
        recording: Library = noting
        return recording

    def _all_of(self, functions: Any) -> dict[str, Callable[..., None]]:
        return {name: partial(self._make, name, function) for name, function in functions._asdict().items()}

    def _make(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Make a call, and write it down."""
        if name in KERNELS:
            self._calls.append(self._call_of(name, arguments))
        else:
            self.refused = self.refused or name
        function(*arguments)

    def _call_of(self, name: str, arguments: tuple[Any, ...]) -> CallArguments:
        call, at = CallArguments(kernel=KERNELS.index(name)), 0
        for argument, kind in zip(arguments, SIGNATURES[f"tllm_{name}"][1], strict=True):
            if kind is c_float:
                call.number = argument
                continue
            if isinstance(argument, ctypes.Structure):
                argument = type(argument).from_buffer_copy(argument)  # the caller may fill it in anew
            if isinstance(argument, (ctypes.Structure, ctypes.Array)):
                self._kept.append(argument)
                argument = ctypes.addressof(argument)
            call.words[at], at = int(argument), at + 1
        return call


def recordable(kernels: Library) -> Library:
    """These kernels, with which a computation has the bits that it has when it is recorded and played."""
    alone = copy.copy(kernels)
    alone.makes_plain_products = True
    return alone


OPERATIONS: dict[Any, Callable[..., Tensor | None]] = {
    aten.empty.memory_format: Recorder._empty,
    aten.empty_like.default: Recorder._empty_like,
    aten.add.Tensor: Recorder._add,
    aten.mul.Tensor: Recorder._scale,
    aten.to.dtype: Recorder._to,
    aten.contiguous.default: Recorder._contiguous,
    aten.pad.default: Recorder._pad,
}
"""What stands for torch's operations; where it gives None, torch makes them."""


def _are_views(found: Any, args: tuple[Any, ...]) -> bool:
    """Whether all that an operation gave lies in the memory of what it was given."""
    given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    made = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, (list, tuple)) else [None]
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in given for x in made)
