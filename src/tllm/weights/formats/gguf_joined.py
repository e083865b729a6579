"""Weights of the model that GGUF files keep as two tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.quantization.blocks import Blocks, Scheme, plain_numbers
from tllm.quantization.stored_tensor import StoredTensor
from tllm.weights.boxes import Box, Shape
from tllm.weights.formats.stacked_experts import MatrixStack, with_stack

EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<expert>\d+)\.gate_proj\.weight")


@dataclass(frozen=True)
class ByTurns:
    """Rows of `first` and of `second` by turns; with `dim` 1 the columns. Both have one shape.

    In blocks if both are in the same ones, else in plain numbers.
    """

    first: StoredTensor
    second: StoredTensor
    dim: int = 0

    @property
    def shape(self) -> Shape:
        return tuple(width * (2 if dim == self.dim else 1) for dim, width in enumerate(self.first.shape))

    @property
    def scheme(self) -> Scheme | None:
        return self.first.scheme if self.first.scheme == self.second.scheme else None

    def aligned(self, box: Box) -> Box:
        of_each = self.second.aligned(self.first.aligned(self._of_each(box)))
        return tuple((2 * a, 2 * b) if dim == self.dim else (a, b) for dim, (a, b) in enumerate(of_each))

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        of_each = self._of_each(box)
        return self.first.plane_boxes(of_each) | self.second.plane_boxes(of_each)

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        of_each = self._of_each(box)
        first, second = self.first.decode(of_each, planes), self.second.decode(of_each, planes)
        if self.scheme is not None:
            assert isinstance(first, Blocks) and isinstance(second, Blocks) and self.dim == 0
            return _blocks_by_turns(first, second)
        return _by_turns(plain_numbers(first), plain_numbers(second), self.dim)

    def _of_each(self, box: Box) -> Box:
        """The box of either tensor that this one needs."""
        return tuple((a // 2, -(-b // 2)) if dim == self.dim else (a, b) for dim, (a, b) in enumerate(box))


@dataclass(frozen=True)
class RowsOfHeads:
    """`kv_b_proj` [heads * (keys + values), latent], of each head its rows for keys and then those for values.

    `keys` [heads, latent, rows], turned, `values` [heads, rows, latent]. Plain numbers, as the model uses no others.
    """

    keys: StoredTensor
    values: StoredTensor

    scheme = None

    @property
    def shape(self) -> Shape:
        heads, width, _ = self.keys.shape
        return heads * self._head, width

    @property
    def _head(self) -> int:
        return self.keys.shape[2] + self.values.shape[1]

    def aligned(self, box: Box) -> Box:
        """All keys or all values of a head, or whole heads."""
        (start, stop), every = box[0], (0, self.keys.shape[1])
        first, last = start // self._head, -(-stop // self._head)
        middle = first * self._head + self.keys.shape[2]
        if last - first == 1 and stop <= middle:
            return (first * self._head, middle), every
        if last - first == 1 and start >= middle:
            return (middle, last * self._head), every
        return (first * self._head, last * self._head), every

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        return {name: at for stored, of_heads in self._parts(box) for name, at in stored.plane_boxes(of_heads).items()}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for stored, of_heads in self._parts(box):
            found = plain_numbers(stored.decode(of_heads, planes))
            parts.append(found.mT if stored is self.keys else found)
        return torch.cat(parts, 1).flatten(0, 1)

    def _parts(self, box: Box) -> list[tuple[StoredTensor, Box]]:
        """What of keys and values an aligned box needs."""
        start, stop = box[0]
        heads = start // self._head, -(-stop // self._head)
        wanted = [(self.keys, start % self._head == 0), (self.values, stop % self._head == 0)]
        return [(one, (heads, *((0, width) for width in one.shape[1:]))) for one, is_there in wanted if is_there]


def _by_turns(first: Tensor, second: Tensor, dim: int) -> Tensor:
    return torch.stack((first, second), dim + 1).flatten(dim, dim + 1)


def _blocks_by_turns(first: Blocks, second: Blocks) -> Blocks:
    others = second.named()
    return Blocks(first.scheme, **{name: _by_turns(x, others[name], 0) for name, x in first.named().items()})


def experts_by_turns(stored: Mapping[str, StoredTensor], file: str) -> dict[str, StoredTensor]:
    """The weights with gates and ups as one matrix of each expert, their biases likewise, and stacks of all experts.

    The matrices have names of their own where they are in few bits, gate, up and down: an expert is used as a whole.
    """
    left, joined = dict(stored), dict[str, StoredTensor]()
    counts: dict[str, int] = {}
    for name in stored:
        found = EXPERT.fullmatch(name)
        if found is not None:
            counts[found["stack"]] = max(counts.get(found["stack"], 0), int(found["expert"]) + 1)
    for stack, count in counts.items():
        gates_ups, downs = list[StoredTensor](), list[StoredTensor]()
        for expert in range(count):
            gate, up, down = (
                _taken(left, f"{stack}.{expert}.{part}_proj.weight", file) for part in ("gate", "up", "down")
            )
            gates_ups.append(_same_shape(ByTurns(gate, up), f"{stack}.{expert}", file))
            downs.append(down)
        made = with_stack(f"{stack}.gate_up_proj", gates_ups) | with_stack(f"{stack}.down_proj", downs)
        if None in (gates_ups[0].scheme, downs[0].scheme):
            made = {name: weight for name, weight in made.items() if isinstance(weight, MatrixStack)}
        joined |= made
        gate, up = (_taken(left, f"{stack}.{part}_proj_bias", file) for part in ("gate", "up"))
        joined[f"{stack}.gate_up_proj_bias"] = _same_shape(ByTurns(gate, up, dim=1), f"{stack}: biases", file)
    return left | joined


def heads_joined(stored: Mapping[str, StoredTensor], file: str) -> dict[str, StoredTensor]:
    """The weights with `kv_b_proj` in the place of its keys and values."""
    left = dict(stored)
    for name in stored:
        if not name.endswith((".k_b_proj.weight", ".v_b_proj.weight")) or name not in left:
            continue
        attention = name[: -len("k_b_proj.weight")]
        keys, values = (_taken(left, f"{attention}{part}_b_proj.weight", file) for part in "kv")
        if keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
            raise WeightsError(
                f"{file}: {attention}k_b_proj has shape {keys.shape} and v_b_proj {values.shape}, and [heads, latent, "
                "rows] and [heads, rows, latent] are needed"
            )
        if f"{attention}kv_b_proj.weight" in left:
            raise WeightsError(f"{file} has {attention}kv_b_proj whole, and in two parts beside it")
        left[f"{attention}kv_b_proj.weight"] = RowsOfHeads(keys, values)
    return left


def _taken(left: dict[str, StoredTensor], name: str, file: str) -> StoredTensor:
    if name not in left:
        raise WeightsError(f"{file} has no tensor that is {name}", "the file is incomplete")
    return left.pop(name)


def _same_shape(joined: ByTurns, what: str, file: str) -> ByTurns:
    if joined.first.shape != joined.second.shape:
        raise WeightsError(
            f"{file}: {what}: the gate has shape {joined.first.shape} and the up {joined.second.shape}, "
            "which are equal in any model"
        )
    return joined
