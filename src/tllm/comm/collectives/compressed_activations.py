"""Activations in fewer bytes, where somebody asked for it: `CompressedGroup` sums and sends over a group by
`Bf16Activations` or `Int8Activations`.

With n ranks and S elements of b bytes on the wire (bf16 2, int8 1 + 4/256), a short sum sends (n - 1) S b bytes from
each rank in one hop, a long one 2 (n - 1) / n S b in two, and what is rounded then is rounded once more. All ranks end
with the same bits. Numbers change, so `error` says by how much; it pays only on a wire that is `bound_by_rate`.
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
"""Elements in a row that share one scale."""


class ActivationFormat(Protocol):
    """How flat numbers are written in fewer bytes."""

    def nbytes(self, count: int) -> int:
        """The length of a message of `count` numbers."""

    def pack(self, flat: Tensor) -> Tensor:
        """The message, uint8."""

    def unpack(self, message: Tensor, count: int) -> Tensor:
        """The numbers that a message says, float32."""


class Bf16Activations:
    """Eight bits of mantissa: a relative error of at most 2^-9 each."""

    def nbytes(self, count: int) -> int:
        return 2 * count

    def pack(self, flat: Tensor) -> Tensor:
        return flat.bfloat16().view(torch.uint8)

    def unpack(self, message: Tensor, count: int) -> Tensor:
        return message.view(torch.bfloat16).float()


class Int8Activations:
    """Scales in float32, then blocks of 8-bit steps: an error of at most 1/254 of the greatest number of the block.

    A block with a number that is not finite has such a scale: it does not go unseen.
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
    """Sums and sends of a group in a narrow form. `error` is the root mean square of all that rounding changed here,
    relative to that of the numbers; 0 before anything was sent."""

    def __init__(self, group: Group, form: ActivationFormat) -> None:
        self.group, self.form = group, form
        self._limit = one_shot_limit(group.size)
        self._changed = self._whole = 0.0

    @property
    def error(self) -> float:
        return math.sqrt(self._changed / self._whole) if self._whole else 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of what each sends, in place; a group of one sends nothing."""
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
        return torch.cat([self.form.unpack(one, len(piece)) for one, piece in zip(sums, pieces, strict=True)])

    def _total(self, messages: list[Tensor], count: int) -> Tensor:
        """The sum of what these messages say, as the tree of `fold.py`."""
        parts = [self.form.unpack(message, count) for message in messages]
        fold(parts, parts[0])
        return parts[0]

    def _rounded(self, flat: Tensor) -> Tensor:
        """The message of some numbers; how far what it says is from them is recorded."""
        message = self.form.pack(flat)
        said = self.form.unpack(message, len(flat))
        self._changed += float((flat.double() - said).square().sum())
        self._whole += float(flat.double().square().sum())
        return message


def bound_by_rate(network: NetworkModel, nbytes: int) -> bool:
    """Whether a message of so many bytes takes longer to leave, over the slowest link, than to travel."""
    pairs = [(a, b) for a in range(network.size) for b in range(network.size) if a != b]
    return any(nbytes / network.rate[a][b] > network.latency[a][b] for a, b in pairs)
