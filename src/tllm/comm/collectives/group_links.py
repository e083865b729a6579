"""`GroupLinks`: one rank's links in a group, its receive buffers, and one exchange of several messages.

`GroupLinks` is what every algorithm of `reduce_and_broadcast.py`, `reduce_scatter.py` and `all_reduce.py` is handed. An
algorithm is a sequence of calls of its `exchange`, each of which is one round of messages. `DeviceLinks` carries out
those between devices of one machine otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tllm.comm.links.link import Link
from tllm.comm.links.send_buffer import PendingSend
from tllm.comm.links.tcp_link import push_all
from tllm.core.errors import LinkError

VIEWS_KEPT = 256
HOST = torch.device("cpu")

LinksByRank = Mapping[int, Link]
"""By the index, in the group, of the rank at the other end."""

TensorsByRank = Mapping[int, torch.Tensor]

Message = tuple[Link, torch.Tensor]


class ReceiveBuffers:
    """Memory that partial results are received into, kept from call to call so that an all-reduce allocates nothing.

    It is on the `device` where what is sent lies. Each peer has one run of bytes, as long as its longest message so
    far, viewed as the tensor that is received.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        self.device = device
        self._memory: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def piece(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor; the next call for the same peer may overwrite its contents."""
        view = self._views.get((peer, shape, dtype))
        return self._make_view(peer, shape, dtype) if view is None else view

    def _make_view(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        # Made outside inference mode: only such tensors may be written both inside and outside it.
        with torch.inference_mode(False):
            if peer not in self._memory or self._memory[peer].numel() < size:
                self._memory[peer] = torch.empty(size, dtype=torch.uint8, device=self.device)
                self._views = {key: view for key, view in self._views.items() if key[0] != peer}
            if len(self._views) >= VIEWS_KEPT:
                self._views.clear()
            view = self._memory[peer][:size].view(dtype).view(shape)
        self._views[peer, shape, dtype] = view
        return view


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """One rank of a group: its index, its links to and from each other rank, and its receive buffers."""

    rank: int
    send: LinksByRank
    recv: LinksByRank
    buffers: ReceiveBuffers

    @property
    def size(self) -> int:
        return len(self.send) + 1

    def exchange(self, sends: TensorsByRank, recvs: TensorsByRank) -> None:
        """Send one tensor to each of some ranks and receive one from each of some, by index, all at once."""
        exchange_messages(
            zip(map(self.send.__getitem__, sends), sends.values(), strict=True),
            zip(map(self.recv.__getitem__, recvs), recvs.values(), strict=True),
        )

    def among(self, ranks: Sequence[int]) -> GroupLinks:
        """The same rank in the smaller group of `ranks`, which holds it; each rank's index is its place in `ranks`."""
        others = [(index, rank) for index, rank in enumerate(ranks) if rank != self.rank]
        send, recv = ({index: links[rank] for index, rank in others} for links in (self.send, self.recv))
        return GroupLinks(list(ranks).index(self.rank), send, recv, self.buffers)


def equal_pieces(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Contiguous `x` in `count` flat pieces, as views; their lengths differ by one element at most."""
    flat = x.view(-1)
    bounds = [flat.numel() * i // count for i in range(count + 1)]
    return [flat[bounds[i] : bounds[i + 1]] for i in range(count)]


def exchange_messages(sends: Iterable[Message], recvs: Iterable[Message]) -> None:
    """Send and receive all of these at once, in the calling thread and without copies, whatever their length.

    While this thread waits for a receive it pushes what its own sends have left, so that two ranks which send each
    other more than the sockets hold do not block each other. A tensor that is sent may be overwritten only when this
    returns. After a LinkError, sends that are not complete end their links.
    """
    pending: list[PendingSend] = []
    try:
        for link, x in sends:
            rest = link.start_send(x)
            if rest is not None:
                pending.append(rest)
        for link, x in recvs:
            link.recv(x.shape, x.dtype, x, pending)
        if pending:
            push_all(pending)
    except LinkError:
        for rest in pending:
            rest.abandon()
        raise
