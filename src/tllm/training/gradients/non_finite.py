"""Finds the tensor that is not finite when a step's norm is not. All ranks agree on it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from torch import nn

from tllm.comm.collectives.group import Group
from tllm.core.errors import NonFiniteError, decoded
from tllm.parallel.shard import shard_of
from tllm.training.state.tensor_blocks import TensorBlock

Place = tuple[int, int]
LAYER = re.compile(r"\.layers\.(\d+)\.")
WEIGHT, LOSS, OWN, SUMMED = range(4)
HINT = "nothing was updated in this step: lower learning_rate or max_grad_norm, warm up longer, and look at its rows"


class NonFiniteFound(msgspec.Struct, frozen=True, order=True):
    """Something that is not finite: a weight, a loss, a rank's own gradient, or one that only its sum made so.

    `place` is where its tensor stands in the model. Causes come before what follows from them, then the model's order.
    """

    kind: int
    place: Place
    rank: int
    name: str


_FOUND = msgspec.msgpack.Decoder(list[NonFiniteFound])


def places_of(parameters: Sequence[nn.Parameter]) -> dict[str, Place]:
    """Where each tensor stands: its layer, or before or after all layers, and its number on this rank."""
    places: dict[str, Place] = {}
    layer = -1
    for parameter in parameters:
        for piece in shard_of(parameter).pieces:
            numbered = LAYER.search(piece.name)
            layer = int(numbered[1]) if numbered else sys.maxsize if layer >= 0 else -1
            places.setdefault(piece.name, (layer, len(places)))
    return places


def bad_names(blocks: Iterable[TensorBlock]) -> list[str]:
    """The tensors of which a block holds something that is not finite."""
    return [block.name for block in blocks if not bool(torch.isfinite(block.tensor).all())]


def bad_blocks(kind: int, names: Iterable[str], places: Mapping[str, Place], rank: int) -> list[NonFiniteFound]:
    return [NonFiniteFound(kind, places[name], rank, name) for name in names]


def agree(found: list[NonFiniteFound], groups: Iterable[Group]) -> list[NonFiniteFound]:
    """Of each kind the first and the last that any rank found; `groups` lead, one after another, to every rank."""
    found = _ends(found)
    for group in groups:
        payloads = group.all_gather_bytes(msgspec.msgpack.encode(found))
        found = _ends([bad for payload in payloads for bad in decoded(payload, _FOUND)])
    return found


def error_of(step: int, norm: float, found: list[NonFiniteFound], late: int = 0) -> NonFiniteError:
    """What stops the run, from what all ranks found. Sums of gradients are of `late` steps before."""
    kinds = {kind: [bad for bad in found if bad.kind == kind] for kind in (WEIGHT, LOSS, OWN, SUMMED)}
    gradients = kinds[OWN] or kinds[SUMMED]
    if late and not kinds[WEIGHT] and not kinds[LOSS]:  # what is a rank's own is of the present step
        step, gradients = step - late, kinds[SUMMED]
    if kinds[WEIGHT]:
        what = f"the weight {_at(kinds[WEIGHT][0])} is not finite"
    elif kinds[LOSS]:
        what = f"the loss is {kinds[LOSS][0].name} on rank {kinds[LOSS][0].rank}"
        what += f", and the gradient is not finite, first that of {_at(gradients[0])}" if gradients else ""
    elif gradients:
        what = f"the gradient of {_at(gradients[0])} is not finite"
        what += f"; backward came to {_at(gradients[-1])} first" if len(gradients) > 1 else ""
    else:
        what = f"the norm of the gradient is {norm}, though each of its elements is finite"
    return NonFiniteError(f"step {step} went bad: {what}", HINT)


def _ends(found: list[NonFiniteFound]) -> list[NonFiniteFound]:
    """The first and the last of each kind."""
    kinds = [sorted(bad for bad in found if bad.kind == kind) for kind in (WEIGHT, LOSS, OWN, SUMMED)]
    return [end for kind in kinds for end in ([kind[0], kind[-1]] if kind[1:] else kind)]


def _at(bad: NonFiniteFound) -> str:
    return f"{bad.name} on rank {bad.rank}"
