"""`TensorBlock`: the part of a named tensor that this rank holds, as a view of its memory. Saves and loads go by
blocks.

A parameter's blocks come from its `Shard`. An optimizer's tensor lies as its parameter does, or holds a flat range of
it (ZeRO); its blocks carry the parameter's names after the state's own: `exp_avg/model.norm.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.parallel.shard import Shard, shard_of
from tllm.weights.boxes import Box, Shape, overlap, runs, whole, widths, within
from tllm.weights.load import part

PROJECTION = "hidden_state_projection."
"""What names begin with of tensors that are learned beside the model: saved with it, and no part of it."""


class TensorBlock(NamedTuple):
    """`tensor` has the shape of `box`, which counts in the whole tensor. It is a view: filling it fills its owner."""

    name: str
    box: Box
    tensor: Tensor


class StateSlice(NamedTuple):
    """Elements [start, start + len(flat)) of a parameter's state called `name`, laid out row by row. A view."""

    parameter: nn.Parameter
    name: str
    start: int
    flat: Tensor


def blocks_of(shard: Shard, tensor: Tensor, state: str = "") -> list[TensorBlock]:
    """The blocks of a tensor that lies as the parameter with this shard does."""
    shape = tuple(tensor.shape)
    return list(_cut(shard, shape, whole(shape), tensor.detach(), state))


def flat_blocks(shard: Shard, shape: Shape, start: int, flat: Tensor, state: str = "") -> list[TensorBlock]:
    """The blocks of elements [start, start + len(flat)) of a parameter of this shape, laid out row by row."""
    blocks, at = list[TensorBlock](), 0
    for box in runs(shape, start, start + flat.numel()):
        stop = at + math.prod(widths(box))
        blocks += _cut(shard, shape, box, flat.detach()[at:stop].view(widths(box)), state)
        at = stop
    return blocks


def model_blocks(model: nn.Module) -> list[TensorBlock]:
    """The blocks of every parameter of a rank's model; one that two modules share comes once."""
    return [block for parameter in model.parameters() for block in blocks_of(shard_of(parameter), parameter)]


def optimizer_blocks(held: Iterable[StateSlice | tuple[nn.Parameter, str, int, Tensor]]) -> list[TensorBlock]:
    """The blocks of an optimizer's states."""
    return [
        block
        for parameter, state, start, flat in held
        for block in flat_blocks(shard_of(parameter), tuple(parameter.shape), start, flat, state)
    ]


def state_of(name: str) -> str:
    """The state that a block's name begins with; "" for the weights themselves."""
    return name.rpartition("/")[0]


def is_of_model(name: str) -> bool:
    """Whether a block is of the model itself: not of the states of an optimizer, nor of what is learned beside it."""
    return not state_of(name) and not name.startswith(PROJECTION)


def _cut(shard: Shard, shape: Shape, region: Box, tensor: Tensor, state: str) -> Iterator[TensorBlock]:
    """What of a parameter's region, held in `tensor`, each piece of the shard names."""
    for piece in shard.pieces:
        target = piece.target or whole(shape)
        met = overlap(region, target)
        if met is not None:
            box = _to_source(met, target, piece.source or whole(widths(target)))
            view = part(tensor, within(met, region)).view(widths(box))
            yield TensorBlock(f"{state}/{piece.name}" if state else piece.name, box, view)


def _to_source(met: Box, target: Box, source: Box) -> Box:
    """A box of the parameter, inside `target`, as a box of the checkpoint's tensor, which may lack dims of width 1."""
    dims, box = list(zip(met, target, strict=True)), list[tuple[int, int]]()
    for first, last in reversed(source):
        while dims[-1][1][1] - dims[-1][1][0] != last - first:
            (start, stop), (low, high) = dims.pop()
            assert high - low == 1, f"a piece from {source} does not fit {target}"
        (start, stop), (low, _) = dims.pop()
        box.insert(0, (first + start - low, first + stop - low))
    assert all(high - low == 1 for _, (low, high) in dims), f"a piece from {source} does not fit {target}"
    return tuple(box)


def update_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients are summed and weights are updated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
