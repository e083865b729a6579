"""Compressed activations, where the user asked for them: `CompressedGroup` sums and sends with fewer bytes.

The formats are `Bf16Activations` and `Int8Activations`. With n ranks and S elements of b bytes each on the wire (bf16
2, int8 1 + 4/256):

    short all-reduce    1 round, each rank sends (n - 1) S b bytes; each number is rounded once
    long all-reduce     2 rounds, each rank sends 2 (n - 1) / n S b bytes; the sums are rounded a second time

All ranks end with the same bits. Compression changes numbers: `error` says by how much. It pays only where a message is
`bound_by_rate`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.comm.collectives.all_reduce import one_shot_limit
from tllm.comm.collectives.fold import fold
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.network_model import NetworkModel

BLOCK = 256
"""Consecutive elements that share one scale."""


class ActivationFormat(Protocol):
    """A compressed encoding of a flat tensor of numbers."""

    def nbytes(self, count: int) -> int:
        """The length of a message of `count` numbers."""

    def pack(self, flat: Tensor) -> Tensor:
        """The message that encodes the numbers, uint8."""

    def unpack(self, message: Tensor, count: int) -> Tensor:
        """The `count` numbers that a message encodes, float32."""


class Bf16Activations:
    """bfloat16, with eight significant bits: a relative error of at most 2^-9 for each number."""

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


class CompressedGroup:
    """All-reduce and messages of a group in a compressed format.

    `error` is the root mean square of what rounding changed in all that this rank sent, relative to that of the
    numbers; 0 before anything was sent.
    """

    def __init__(self, group: Group, form: ActivationFormat) -> None:
        self.group, self.form = group, form
        self._limit = one_shot_limit(group.size)
        self._squared_error = self._squared_sum = 0.0

    @property
    def error(self) -> float:
        return math.sqrt(self._squared_error / self._squared_sum) if self._squared_sum else 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of their rounded `x`, in place; a group of one rank rounds nothing."""
        if self.group.size == 1:
            return x
        flat = x.detach().flatten().cpu()
        short = self.form.nbytes(len(flat)) <= self._limit
        total = self._sum_whole(flat) if short else self._sum_in_pieces(flat)
        x.detach().copy_(total.view(x.shape))
        return x

    def send_to(self, peer: int, x: Tensor) -> None:
        """Send to one rank, which calls `recv_from`."""
        self.group.send_to(peer, self._rounded(x.detach().flatten().cpu()))

    def recv_from(self, peer: int, out: Tensor) -> Tensor:
        """Receive `out`, of its shape, from one rank."""
        message = self.group.recv_from(peer, torch.empty(self.form.nbytes(out.numel()), dtype=torch.uint8))
        out.detach().copy_(self.form.unpack(message, out.numel()).view(out.shape))
        return out

    def _sum_whole(self, flat: Tensor) -> Tensor:
        message = self._rounded(flat)
        messages = self.group.all_gather(message, [tuple(message.shape)] * self.group.size)
        return self._total(messages, len(flat))

    def _sum_in_pieces(self, flat: Tensor) -> Tensor:
        rank, size = self.group.rank, self.group.size
        pieces = flat.tensor_split(size)
        messages = [self._rounded(piece) for piece in pieces]
        parts = [torch.empty_like(messages[rank]) for _ in range(size)]
        self.group.all_to_all(messages, parts)
        mine = self._rounded(self._total(parts, len(pieces[rank])))
        sums = self.group.all_gather(mine, [(self.form.nbytes(len(piece)),) for piece in pieces])
        return torch.cat([self.form.unpack(total, len(piece)) for total, piece in zip(sums, pieces, strict=True)])

    def _total(self, messages: list[Tensor], count: int) -> Tensor:
        """The sum of the numbers of these messages, in the order of the tree of `fold.py`."""
        parts = [self.form.unpack(message, count) for message in messages]
        fold(parts, parts[0])
        return parts[0]

    def _rounded(self, flat: Tensor) -> Tensor:
        """The message of some numbers; its rounding error is added to what `error` is made from."""
        message = self.form.pack(flat)
        decoded = self.form.unpack(message, len(flat))
        self._squared_error += float((flat.double() - decoded).square().sum())
        self._squared_sum += float(flat.double().square().sum())
        return message


def bound_by_rate(network: NetworkModel, nbytes: int) -> bool:
    """Whether on some link the bytes of a message take longer than its latency, so that fewer bytes save time."""
    pairs = [(a, b) for a in range(network.size) for b in range(network.size) if a != b]
    return any(nbytes / network.rate[a][b] > network.latency[a][b] for a, b in pairs)
