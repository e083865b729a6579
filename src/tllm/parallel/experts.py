"""The experts that one rank holds of a mixture-of-experts layer: whole ones, or a part of each one's width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.expert_dispatch import Route, combine, dispatch
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range

Names = Callable[[int, str], str]


class Experts(nn.Module):
    """y_TD = sum over chosen experts of weight * down(act(gate(x)) * up(x)), for the experts and widths held here.

    The result is a partial sum over the ranks, whichever way the experts are cut. `names(expert, "gate")` gives the
    checkpoint's name of an expert's gate, up or down; `act` takes gate and up side by side. The ranks of `ep` have
    other tokens each, and hold `holders[p]` of the experts for all of them.
    """

    def __init__(
        self,
        holders: tuple[Range, ...],
        columns: Range,
        hidden: int,
        names: Names,
        act: Callable[[Tensor], Tensor],
        ep: Group,
    ) -> None:
        super().__init__()
        assert len(holders) == ep.size, "each rank of ep holds some of the experts"
        self.holders, self.ep = holders, ep
        self.first, last = holders[ep.rank]
        count, spread = last - self.first, ep.size > 1
        start, stop = columns
        size = stop - start
        gate_up, down = [], []
        for local in range(count):
            expert = self.first + local
            here = (local, local + 1)
            rows, cols = ((start, stop), (0, hidden)), ((0, hidden), (start, stop))
            gate_up.append(ShardPiece(names(expert, "gate"), rows, (here, (0, size), (0, hidden))))
            gate_up.append(ShardPiece(names(expert, "up"), rows, (here, (size, 2 * size), (0, hidden))))
            down.append(ShardPiece(names(expert, "down"), cols, (here, (0, hidden), (0, size))))
        self.gate_up = cut_parameter((count, 2 * size, hidden), Shard(tuple(gate_up), spread=spread))
        self.down = cut_parameter((count, hidden, size), Shard(tuple(down), spread=spread))
        self.act = act

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if self.ep.size == 1:
            return self.of_rows(x_TD, weights_TK, experts_TK)
        route = Route(experts_TK, self.holders, self.ep)
        return combine(self.of_rows(*dispatch(x_TD, weights_TK, experts_TK, route)), route)

    def of_rows(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The sum over the experts held here, of rows that are here."""
        y_TD = torch.zeros_like(x_TD)
        count = self.gate_up.shape[0]
        gate_up: Sequence[Tensor] | Tensor = self.gate_up
        down: Sequence[Tensor] | Tensor = self.down
        if torch.is_grad_enabled():
            # Experts without a token take part too: every rank then has the same backward pass, with the same sums in
            # the same order, and every parameter a gradient.
            chosen = list(range(self.first, self.first + count))
            gate_up, down = self.gate_up.unbind(), self.down.unbind()
        else:
            chosen = torch.unique(experts_TK).tolist()
        for expert in chosen:
            local = expert - self.first
            if not 0 <= local < count:
                continue
            tokens, places = torch.where(experts_TK == expert)
            out = F.linear(self.act(F.linear(x_TD[tokens], gate_up[local])), down[local])
            y_TD.index_add_(0, tokens, (out * weights_TK[tokens, places, None]).to(y_TD.dtype))
        return y_TD
