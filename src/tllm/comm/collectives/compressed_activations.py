"""Formats of compressed activations, where the user asked for them: `Bf16Activations` and `Int8Activations`.

An element takes 2 bytes on the wire in bf16, and 1 + 4/256 in int8. `CompressedHop` sends in them.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Consecutive elements that share one scale."""


class ActivationFormat(Protocol):
    """A compressed encoding of a flat tensor of numbers, of which each `block` in turn is encoded by itself."""

    block: int

    def nbytes(self, count: int) -> int:
        """The length of a message of `count` numbers."""

    def pack(self, flat: Tensor) -> Tensor:
        """The message that encodes the numbers, uint8."""

    def unpack(self, message: Tensor, count: int) -> Tensor:
        """The `count` numbers that a message encodes, float32."""


class Bf16Activations:
    """bfloat16, with eight significant bits: a relative error of at most 2^-9 for each number."""

    block = 1

    def nbytes(self, count: int) -> int:
        return 2 * count

    def pack(self, flat: Tensor) -> Tensor:
        return flat.bfloat16().view(torch.uint8)

    def unpack(self, message: Tensor, count: int) -> Tensor:
        return message.view(torch.bfloat16).float()


class Int8Activations:
    """Blocks of 8-bit integers with one float32 scale each: an error of at most 1/254 of a block's greatest number.

    The message has all scales first. A block with a number that is not finite has a scale that is not finite, so that
    the numbers of that block are not finite either.
    """

    block = BLOCK

    def nbytes(self, count: int) -> int:
        return -(-count // BLOCK) * (4 + BLOCK)

    def pack(self, flat: Tensor) -> Tensor:
        rows = F.pad(flat.float(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scale = rows.abs().amax(1) / 127
        steps = (rows / torch.where(scale > 0, scale, 1)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), steps.view(torch.uint8).flatten()])

    def unpack(self, message: Tensor, count: int) -> Tensor:
        blocks = -(-count // BLOCK)
        scale, steps = message[: 4 * blocks].view(torch.float32), message[4 * blocks :].view(torch.int8)
        return (steps.view(-1, BLOCK) * scale[:, None]).flatten()[:count]
