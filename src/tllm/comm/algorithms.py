"""How a sum over ranks is carried out: `one_shot` for short messages, `two_step` for long ones, both direct.

Both add as a balanced tree in rank order, ((x_0 + x_1) + (x_2 + x_3)) + …, so every rank ends with the same bits, and
2^k ranks with those that one rank has which adds in such a tree itself. 16-bit floats are added in float32 and rounded
once. With S bytes, n ranks, latency L and B bytes/s for each rank's sending:

    one_shot   L + (n - 1) S / B            every rank sends all it has to every other
    two_step   2 L + 2 (n - 1) / n S / B    every rank sums one piece, then sends the sum to every other
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tllm.comm.inbox import push_all
from tllm.comm.link import Link
from tllm.comm.outbox import Unsent
from tllm.comm.scratch import Scratch
from tllm.ground.errors import LinkError

LATENCY_BYTES = 64 * 1024  # L * B: what a link could carry while one message is on its way
NARROW = (torch.float16, torch.bfloat16)

Links = Mapping[int, Link]  # by index of the other rank in the group
Message = tuple[Link, torch.Tensor]


def one_shot_limit(size: int, latency_bytes: float = LATENCY_BYTES) -> float:
    """Bytes up to which `one_shot` is the faster of the two; for two ranks it always is, since both send S bytes."""
    return math.inf if size <= 2 else latency_bytes / ((size - 1) * (1 - 2 / size))


def one_shot(x: torch.Tensor, rank: int, send: Links, recv: Links, scratch: Scratch) -> None:
    """Replace contiguous `x` by its sum over ranks, in one hop."""
    shape, dtype = x.shape, x.dtype
    pieces = [x if peer == rank else scratch.piece(peer, shape, dtype) for peer in range(len(send) + 1)]
    exchange([(link, x) for link in send.values()], [(link, pieces[peer]) for peer, link in recv.items()])
    add_as_tree(pieces, x)


def two_step(x: torch.Tensor, rank: int, send: Links, recv: Links, scratch: Scratch) -> None:
    """Replace contiguous `x` by its sum over ranks, in two hops: each rank sums one piece of it."""
    size = len(send) + 1
    flat = x.view(-1)
    bounds = [flat.numel() * i // size for i in range(size + 1)]
    pieces = [flat[bounds[i] : bounds[i + 1]] for i in range(size)]
    mine = pieces[rank]
    parts = [mine if peer == rank else scratch.piece(peer, mine.shape, x.dtype) for peer in range(size)]
    exchange(
        [(link, pieces[peer]) for peer, link in send.items()], [(link, parts[peer]) for peer, link in recv.items()]
    )
    add_as_tree(parts, mine)
    exchange([(link, mine) for link in send.values()], [(link, pieces[peer]) for peer, link in recv.items()])


def exchange(sends: list[Message], recvs: list[Message]) -> None:
    """Send and receive all of these at once, in this thread and without copies, whatever their length.

    A tensor to be sent may be overwritten only when this returns.
    """
    unsent: list[Unsent] = []
    try:
        for link, x in sends:
            left = link.start(x)
            if left is not None:
                unsent.append(left)
        for link, x in recvs:
            link.recv(x.shape, x.dtype, x, unsent)
        if unsent:
            push_all(unsent)
    except LinkError:
        for left in unsent:
            left.abandon()
        raise


def add_as_tree(pieces: list[torch.Tensor], out: torch.Tensor) -> None:
    """out = ((p_0 + p_1) + (p_2 + p_3)) + …, where `out` is one of the pieces; the others may be overwritten."""
    left, right = _halves(pieces)
    torch.add(_tree_sum(left, out.dtype in NARROW), _tree_sum(right, out.dtype in NARROW), out=out)


def _tree_sum(pieces: list[torch.Tensor], widen: bool) -> torch.Tensor:
    """The sum of some pieces, in the memory of the first; 16-bit ones in float32 where more than one is added."""
    if len(pieces) == 1:
        return pieces[0]
    left, right = _halves(pieces)
    total = _tree_sum(left, widen)
    return (total.float() if widen else total).add_(_tree_sum(right, widen))


def _halves(pieces: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A full subtree, of as many pieces as a power of two, and the rest."""
    full = 1 << (len(pieces) - 1).bit_length() - 1
    return pieces[:full], pieces[full:]
