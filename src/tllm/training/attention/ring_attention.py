"""`RingAttention`: attention over a microbatch whose tokens are spread over the cp ranks (Ring Attention, 2310.01889).

In round s a rank's queries meet the keys and values of the rank s places before it, which came while it computed the
round before. They come from there directly, as every rank of a group has a link to every other, and only those that
are seen: with the pieces of `zigzag` and one document of T tokens, rank r of n sends (n - 1 + r) T / 2 n keys a layer,
never more than the (n - 1) T / n of neighbours that pass on all they have. Backward, keys and values come once more and
their gradients go home, each rank's part directly, summed there in the order of rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group, Shape
from tllm.model.attention import AttentionSpec
from tllm.model.recurrence import Advance
from tllm.training.attention.context_parallel import Tile, VisibleKeys, located, zigzag
from tllm.training.attention.tiled_attention import Gradients, OnlineSoftmax, Queries, by_token
from tllm.training.data.batch_tensors import Span, Tokens, picked
from tllm.training.state.tensor_blocks import update_dtype


class RingAttention:
    """A `MakeAttend` for a rank of `cp`. What it sends and receives is moved by a thread of its own, in one order.

    The ranks must play the same schedule over the same microbatches.
    """

    def __init__(self, cp: Group) -> None:
        self.cp = cp
        self._thread = ThreadPoolExecutor(1, f"tllm-cp-{cp.rank}")

    def __call__(self, specs: dict[int, AttentionSpec], tokens: Tokens) -> RingAttend:
        return RingAttend(self, specs, tokens)

    def swap(self, target: int, x: Tensor, source: int, shape: Shape) -> Future[Tensor]:
        """Start to send a tensor to one rank and to receive one of this shape from another. No elements, no message."""
        return self._thread.submit(self._swap, target, x, source, shape)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _swap(self, target: int, x: Tensor, source: int, shape: Shape) -> Tensor:
        came = torch.empty(shape, dtype=x.dtype, device=x.device)
        sends = {target: x.contiguous()} if x.numel() else {}
        self.cp.exchange(sends, {source: came} if came.numel() else {})
        return came


class RingRound(NamedTuple):
    """Queries here meet keys of `source`, `comes` of them, while the spans `leaves` of those here go to `target`."""

    source: int
    target: int
    leaves: list[Span]
    comes: int
    tiles: list[Tile]


class RingAttend:
    """Causal attention inside each document of a microbatch, of which this rank has the tokens of `zigzag`."""

    def __init__(self, ring: RingAttention, specs: dict[int, AttentionSpec], tokens: Tokens) -> None:
        assert not tokens.prefixes, "a ring knows of no keys that several documents see"
        self.ring, self.specs, self.tokens = ring, specs, tokens
        self.spans = zigzag(sum(tokens.lengths), ring.cp.size)
        held = self.spans[ring.cp.rank] if ring.cp.size > 1 else None
        assert tokens.spans == held, "the tokens here are those of another rank"
        self._walks: dict[int | None, Walk] = {}

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        spec = self.specs[layer]
        if spec.window not in self._walks:
            self._walks[spec.window] = self._walk(VisibleKeys(self.tokens.lengths, spec.window, q_TNH.device))
        walk = self._walks[spec.window]
        return _Attention.apply(q_TNH, k_TKH, v_TKH, sinks_N, spec, walk)  # type: ignore[no-any-return, no-untyped-call]

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """A state would have to go from rank to rank in the order of tokens: `check_trainable` refuses such plans."""
        raise AssertionError(f"layer {layer} has a state, and its tokens are on {self.ring.cp.size} ranks")

    def _walk(self, sight: VisibleKeys) -> Walk:
        rank, size = self.ring.cp.rank, self.ring.cp.size
        here = self.spans[rank]
        rounds = [RingRound(rank, rank, [], 0, sight.tiles(here, here))]
        for distance in range(1, size):
            source, target = (rank - distance) % size, (rank + distance) % size
            come = sight.seen(here, self.spans[source])
            leave = within(sight.seen(self.spans[target], here), here)
            rounds.append(RingRound(source, target, leave, count(come), sight.tiles(here, come)))
        return Walk(self.ring, sight, rounds)


class Walk(NamedTuple):
    """The rounds of a layer, the first with this rank's own keys."""

    ring: RingAttention
    sight: VisibleKeys
    rounds: list[RingRound]

    def blocks(self, kv_2SKH: Tensor) -> Iterator[tuple[RingRound, Tensor]]:
        """Each round with its keys and values; while one is worked on, those of the next are on their way."""
        kv_of_round, coming = kv_2SKH, None
        for number, now in enumerate(self.rounds):
            if coming is not None:
                kv_of_round = coming.result()
            if number + 1 < len(self.rounds):
                then = self.rounds[number + 1]
                shape = (2, then.comes, *kv_2SKH.shape[2:])
                coming = self.ring.swap(then.target, picked(kv_2SKH, then.leaves, 1), then.source, shape)
            yield now, kv_of_round


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        sinks_N: Tensor | None,
        spec: AttentionSpec,
        walk: Walk,
    ) -> Tensor:
        kv_2SKH = torch.stack((k_TKH, v_TKH))
        queries = Queries(spec, walk.sight, q_TNH, k_TKH.shape[1])
        sums = OnlineSoftmax(queries, sinks_N)
        for now, kv_of_round in walk.blocks(kv_2SKH):
            sums.meet(now.tiles, queries.block(kv_of_round))
        out_KGTH, lse_KGT = sums.done()
        out_TNH = by_token(out_KGTH).to(q_TNH.dtype).contiguous()
        ctx.spec, ctx.walk = spec, walk
        ctx.save_for_backward(q_TNH, kv_2SKH, out_TNH, lse_KGT, sinks_N)
        return out_TNH

    @staticmethod
    def backward(ctx: Any, of_out_TNH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        q_TNH, kv_2SKH, out_TNH, lse_KGT, sinks_N = ctx.saved_tensors
        walk: Walk = ctx.walk
        queries = Queries(ctx.spec, walk.sight, q_TNH, kv_2SKH.shape[2])
        gradients = Gradients(queries, lse_KGT, out_TNH, of_out_TNH)
        home = _Home(walk.ring, kv_2SKH)
        for now, kv_of_round in walk.blocks(kv_2SKH):
            of_block = gradients.meet(now.tiles, queries.block(kv_of_round))
            home.take(now, gradients.joined(of_block, kv_2SKH.shape[2]))
        of_k_TKH, of_v_TKH = home.done()
        of_sinks_N = None if sinks_N is None else gradients.of_sinks(sinks_N).to(sinks_N.dtype)
        return gradients.of_q_TNH.to(q_TNH.dtype), of_k_TKH, of_v_TKH, of_sinks_N, None, None


class _Home:
    """The gradients of this rank's keys and values: what each round has for them comes while the next is worked on."""

    def __init__(self, ring: RingAttention, kv_2SKH: Tensor) -> None:
        self.ring, self.kv_2SKH = ring, kv_2SKH
        self.sum_2SKH = torch.zeros_like(kv_2SKH, dtype=update_dtype(kv_2SKH.dtype))
        self.coming: tuple[RingRound, Future[Tensor]] | None = None

    def take(self, now: RingRound, of_block_2SKH: Tensor) -> None:
        """Add a round's gradients, or send them to whom they belong."""
        if now.source == now.target == self.ring.cp.rank:
            self.sum_2SKH += of_block_2SKH
            return
        self._add()
        shape = (2, count(now.leaves), *self.kv_2SKH.shape[2:])
        self.coming = now, self.ring.swap(now.source, of_block_2SKH.to(self.kv_2SKH.dtype), now.target, shape)

    def done(self) -> tuple[Tensor, Tensor]:
        self._add()
        of_k_TKH, of_v_TKH = self.sum_2SKH.to(self.kv_2SKH.dtype)
        return of_k_TKH, of_v_TKH

    def _add(self) -> None:
        if self.coming is not None:
            of_round, came = self.coming
            part_2SKH = came.result()
            for start, stop, at in located(of_round.leaves):
                self.sum_2SKH[:, start:stop] += part_2SKH[:, at : at + stop - start]


def within(parts: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Where parts of spans are when the spans are put end to end."""
    return [
        (at + first - start, at + last - start)
        for start, stop, at in located(spans)
        for first, last in parts
        if start <= first and last <= stop
    ]


def count(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)
