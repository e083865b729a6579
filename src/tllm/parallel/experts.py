"""The experts that one rank holds of a mixture-of-experts layer: whole ones, or a part of each one's width."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.expert_dispatch import Route, combine, dispatch
from tllm.parallel.linear import matmul
from tllm.parallel.quantized_weight import QuantizedWeight, expert_weight
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range

Act = Callable[[Tensor], Tensor]
"""What stands between an expert's two products, of gate and up together."""

Names = Callable[[int, str], str]
"""(an expert's number, "gate", "up" or "down") -> its tensor's name in the checkpoint."""


class ExpertSum(nn.Module):
    """y_TD = sum over chosen experts of weight * expert(x), for the experts and widths held here.

    The result is a partial sum over the ranks, whichever way the experts are cut. The ranks of `ep` have other tokens
    each, and hold `holders[p]` of the experts for all of them.
    """

    def __init__(self, holders: tuple[Range, ...], ep: Group) -> None:
        super().__init__()
        assert len(holders) == ep.size, "each rank of ep holds some of the experts"
        self.holders, self.ep = holders, ep
        self.first, last = holders[ep.rank]
        self.count = last - self.first

    @abstractmethod
    def stacks(self) -> tuple[nn.Parameter, ...]:
        """The weights of all experts held here, each [experts, …]."""

    @abstractmethod
    def of_expert(self, x_TD: Tensor, *weights: Tensor | QuantizedWeight) -> Tensor:
        """What the expert with these weights, one of each stack, makes of rows."""

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if self.ep.size == 1:
            return self.of_rows(x_TD, weights_TK, experts_TK)
        route = Route(experts_TK, self.holders, self.ep)
        return combine(self.of_rows(*dispatch(x_TD, weights_TK, experts_TK, route)), route)

    def of_rows(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The sum over the experts held here, of rows that are here."""
        y_TD = torch.zeros_like(x_TD)
        stacks: Sequence[Sequence[Tensor] | Tensor] = self.stacks()
        if torch.is_grad_enabled():
            # Experts without a token take part too: every rank then has the same backward pass, with the same sums in
            # the same order, and every parameter a gradient.
            chosen = list(range(self.first, self.first + self.count))
            stacks = [stack.unbind() for stack in self.stacks()]
        else:
            chosen = torch.unique(experts_TK).tolist()
        for expert in chosen:
            local = expert - self.first
            if not 0 <= local < self.count:
                continue
            tokens, places = torch.where(experts_TK == expert)
            out = self.of_expert(x_TD[tokens], *(expert_weight(stack, local) for stack in stacks))
            y_TD.index_add_(0, tokens, (out * weights_TK[tokens, places, None]).to(y_TD.dtype))
        return y_TD


class Experts(ExpertSum):
    """expert(x) = down(act(gate(x), up(x))), of a checkpoint with tensors of their own for each expert.

    `act` takes gate and up side by side.
    """

    def __init__(
        self, holders: tuple[Range, ...], columns: Range, hidden: int, names: Names, act: Act, ep: Group
    ) -> None:
        super().__init__(holders, ep)
        start, stop = columns
        size = stop - start
        gate_up, down = [], []
        for local in range(self.count):
            expert = self.first + local
            here = (local, local + 1)
            rows, cols = ((start, stop), (0, hidden)), ((0, hidden), (start, stop))
            gate_up.append(ShardPiece(names(expert, "gate"), rows, (here, (0, size), (0, hidden))))
            gate_up.append(ShardPiece(names(expert, "up"), rows, (here, (size, 2 * size), (0, hidden))))
            down.append(ShardPiece(names(expert, "down"), cols, (here, (0, hidden), (0, size))))
        spread = ep.size > 1
        self.gate_up = cut_parameter((self.count, 2 * size, hidden), Shard(tuple(gate_up), spread=spread))
        self.down = cut_parameter((self.count, hidden, size), Shard(tuple(down), spread=spread))
        self.act = act

    def stacks(self) -> tuple[nn.Parameter, ...]:
        return self.gate_up, self.down

    def of_expert(self, x_TD: Tensor, *weights: Tensor | QuantizedWeight) -> Tensor:
        gate_up, down = weights
        return matmul(self.act(matmul(x_TD, gate_up)), down)


class StackedExperts(ExpertSum):
    """The same with biases, of a checkpoint with one tensor for all experts, which lie as they do there.

    That is [experts, inputs, outputs], and columns 2 i and 2 i + 1 of the first product are gate and up of width i: a
    range of widths is one of columns. `act` takes them so. The bias of the second product goes with the first width,
    so that one rank adds it.
    """

    def __init__(self, holders: tuple[Range, ...], columns: Range, hidden: int, name: str, act: Act, ep: Group) -> None:
        super().__init__(holders, ep)
        start, stop = columns
        here, both, every = holders[ep.rank], (2 * start, 2 * stop), (0, hidden)

        def stack(part: str, *source: Range) -> nn.Parameter:
            box = (here, *source)
            piece = ShardPiece(f"{name}.{part}", source=box)
            shard = Shard((piece,), spread=ep.size > 1, plain=True)
            return cut_parameter(tuple(b - a for a, b in box), shard)

        self.gate_up, self.gate_up_bias = stack("gate_up_proj", every, both), stack("gate_up_proj_bias", both)
        self.down = stack("down_proj", columns, every)
        self.down_bias = stack("down_proj_bias", every) if start == 0 else None
        self.act = act

    def stacks(self) -> tuple[nn.Parameter, ...]:
        held = self.gate_up, self.gate_up_bias, self.down
        return held if self.down_bias is None else (*held, self.down_bias)

    def of_expert(self, x_TD: Tensor, *weights: Tensor | QuantizedWeight) -> Tensor:
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        assert len(plain) == len(weights), "stacks of this layout are held as plain numbers"
        gate_up, gate_up_bias, down, *down_bias = plain
        y_TD = self.act(torch.addmm(gate_up_bias, x_TD, gate_up)) @ down
        return y_TD + down_bias[0] if down_bias else y_TD
