"""Activation recomputation: activations that are not kept but computed again in the backward pass.

"layer" keeps a layer's input and runs its forward pass again (Chen et al., 1604.06174). "selective" does so for the
core of attention only, whose scores take most memory for the work they are (2205.05198, section 5). Either way the
numbers are the same to the bit: the same products are made in the same order, and nothing in the model is random.

The chunks of a gated delta net are always recomputed: they take many times the memory of their inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tllm.model.attention import Attend
from tllm.model.recurrence import Advance
from tllm.model.transformer import Transformer
from tllm.spec.plan import Recompute
from tllm.training.attention.packed_attention import MakeAttend


def recompute(how: Recompute, chunks: Sequence[Transformer], make_attend: MakeAttend) -> MakeAttend:
    """Let a rank's chunks keep less; returns what the schedule is to be played with in place of `make_attend`."""
    if how == "layer":
        for model in chunks:
            for layer in model.layers.values():
                # Under the module's hooks, which see one forward and one backward pass as always.
                layer.forward = partial(forget, layer.forward)
        return make_attend
    recurs = any(chunk.state_shapes() for chunk in chunks)
    if not recurs and how == "none":
        return make_attend
    return lambda *of_microbatch: _Forgetful(make_attend(*of_microbatch), selective=how == "selective")


def forget(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, of which its backward pass keeps the inputs alone and works out the rest when it is wanted.

    That is once, as far as the last tensor that is wanted, however many calls of autograd the pass is made of. What was
    worked out lives as long as the graph's nodes that want it. Sums over ranks on the way are made again.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    call = _Call(function, inputs)
    with saved_tensors_hooks(call.pack, call.unpack):
        return function(*inputs)


class _Place:
    """Stands in the graph where a saved tensor would."""

    __slots__ = ("__weakref__",)


class _Enough(Exception):
    """All that the graph wants is there."""


class _Call:
    """One call whose saved tensors are forgotten. `again` holds them while the graph wants them."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Any]) -> None:
        self.function, self.inputs = function, inputs
        self.places: list[weakref.ref[_Place]] = []
        self.again: weakref.WeakKeyDictionary[_Place, Tensor] = weakref.WeakKeyDictionary()

    def pack(self, _: Tensor) -> _Place:
        place = _Place()
        self.places.append(weakref.ref(place))
        return place

    def unpack(self, place: _Place) -> Tensor:
        if place not in self.again:
            self.repeat()
        return self.again[place]

    def repeat(self) -> None:
        """Run the function again, and stop at its last saved tensor: what would follow is wanted by nobody."""
        left = iter(self.places)
        last = self.places[-1]

        def keep(x: Tensor) -> Tensor:
            x = x.detach()  # or an operation that keeps its own result would keep itself alive
            reference = next(left)
            place = reference()
            if place is not None:
                self.again[place] = x
            if reference is last:
                raise _Enough
            return x

        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
                self.function(*self.inputs)
        except _Enough:
            return
        raise AssertionError("a second run saves as many tensors as the first")


class _Forgetful:
    """An `Attend` whose states are forgotten, and with `selective` its attention too."""

    def __init__(self, attend: Attend, selective: bool) -> None:
        self.attend, self.selective = attend, selective

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        if self.selective:
            return forget(self.attend, layer, q_TNH, k_TKH, v_TKH, sinks_N)
        return self.attend(layer, q_TNH, k_TKH, v_TKH, sinks_N)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        return forget(self.attend.recur, layer, advance, *rows)
