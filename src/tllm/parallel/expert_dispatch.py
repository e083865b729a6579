"""Sends rows to the ranks that hold their experts, and brings them back: GShard's all-to-all (2006.16668), without
drops.

A row goes once to each rank that holds one or more of its K experts, and what these make of it comes back as one sum.
Of b bytes a number, D to a row, a rank whose n rows go to others, and to which r rows come from others, sends

    forward    (n (D + 2 K) + r D) b        backward    (n D + r (D + K)) b

and 8 bytes to each other rank, which say how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.spec.cut import Range

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of 2, 4 and 8 bytes: expert numbers travel in the same message as the rows, as bits of the rows' dtype."""


class ExpertRows(NamedTuple):
    """Rows in the order of the experts they go to, N of them: their tokens, their experts here and their weights.

    The rows of expert e are [first_rows[e], first_rows[e + 1]).
    """

    tokens_N: Tensor
    experts_N: Tensor
    weights_N1: Tensor
    first_rows: Tensor

    def split(self, x_ND: Tensor) -> list[tuple[int, Tensor]]:
        return split_by_expert(x_ND, self.first_rows)


def split_by_expert(x_ND: Tensor, first_rows: Tensor) -> list[tuple[int, Tensor]]:
    """The rows of each expert that has some, by its number; without any row, none for the first: results then still
    hang on them, so that every parameter has its gradient, and ranks that share experts the same backward pass."""
    parts = torch.split(x_ND, first_rows.diff().tolist())
    return [(number, part) for number, part in enumerate(parts) if len(part)] or [(0, x_ND)]


class Route:
    """Which tokens of this rank go to each rank of `ep` (`places`), and how many rows come from each (`counts`).

    Every rank of `ep` must make one for each layer and each microbatch, in the same order, tokens or not.
    """

    def __init__(self, experts_TK: Tensor, holders: Sequence[Range], ep: Group) -> None:
        self.ep, self.tokens = ep, len(experts_TK)
        self.places = [
            ((experts_TK >= first) & (experts_TK < stop)).any(-1).nonzero().flatten() for first, stop in holders
        ]
        going = {peer: torch.tensor([len(self.places[peer])]) for peer in ep.send}
        coming = {peer: torch.empty(1, dtype=torch.int64) for peer in ep.recv}
        ep.exchange(going, coming)
        self.counts = [len(self.places[peer]) if peer == ep.rank else int(coming[peer]) for peer in range(ep.size)]

    def go(self, *columns: Tensor) -> Tensor:
        """The rows (all `columns` side by side) that this rank's experts work on: those of rank 0, then of rank 1, …"""
        rows = [torch.cat([column[places] for column in columns], -1) for places in self.places]
        return torch.cat(self._exchange(rows, self.counts))

    def back(self, x_NW: Tensor) -> Tensor:
        """For each of this rank's tokens the sum of what `go` made of it, in rank order; zero if it went nowhere."""
        parts = self._exchange(torch.split(x_NW, self.counts), [len(places) for places in self.places])
        x_TW = x_NW.new_zeros(self.tokens, x_NW.shape[-1])
        for places, part in zip(self.places, parts, strict=True):
            x_TW.index_add_(0, places, part)
        return x_TW

    def _exchange(self, rows: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Send `rows[p]` to each rank p; returns what each rank has sent, `counts[p]` rows."""
        mine = rows[self.ep.rank]
        sends = {peer: rows[peer].contiguous() for peer in self.ep.send}
        recvs = {peer: mine.new_empty(counts[peer], mine.shape[-1]) for peer in self.ep.recv}
        self.ep.exchange(sends, recvs)
        return [mine if peer == self.ep.rank else recvs[peer] for peer in range(self.ep.size)]


def dispatch(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
    """x_ND, weights_NK, experts_NK of the rows that came here; backward: the gradients of x and weights go back."""
    assert weights_TK.dtype == x_TD.dtype, "a row and its weights travel as one"
    return _Dispatch.apply(x_TD, weights_TK, experts_TK, route)  # type: ignore[no-any-return, no-untyped-call]


def combine(y_ND: Tensor, route: Route) -> Tensor:
    """y_TD: for each token the sum of what ranks made of its row; backward: each gets the token's gradient."""
    return _Combine.apply(y_ND, route)  # type: ignore[no-any-return, no-untyped-call]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, route: Route
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.route, ctx.widths = route, [x_TD.shape[-1], weights_TK.shape[-1]]
        integer = INTEGERS[x_TD.dtype.itemsize]
        bits_TK = experts_TK.to(integer).view(x_TD.dtype)
        rows_NW = route.go(x_TD, weights_TK, bits_TK)
        x_ND, weights_NK, bits_NK = torch.split(rows_NW, [*ctx.widths, ctx.widths[1]], -1)
        experts_NK = bits_NK.contiguous().view(integer).long()
        ctx.mark_non_differentiable(experts_NK)
        return x_ND, weights_NK, experts_NK

    @staticmethod
    def backward(ctx: Any, of_x_ND: Tensor, of_weights_NK: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        back_TW = ctx.route.back(torch.cat([of_x_ND, of_weights_NK], -1))
        of_x_TD, of_weights_TK = torch.split(back_TW, ctx.widths, -1)
        return of_x_TD, of_weights_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.back(y_ND)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None]:
        return ctx.route.go(gradient_TD), None
