"""The experts that one rank holds of a mixture-of-experts layer: whole ones, or a part of each one's width."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.kernels.batch_invariant import invariant_matmul, is_batch_invariant
from tllm.kernels.library import is_torch_held
from tllm.kernels.training.training_matmul import training_matmul
from tllm.parallel.expert_dispatch import ExpertRows, Route, combine, dispatch
from tllm.parallel.linear import Adapt, matmul, unadapted
from tllm.parallel.quantized_weight import QuantizedStack, QuantizedWeight, expert_weight, quantized_stack
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.quantization.reference_matmul import on_grid
from tllm.spec.cut import Range
from tllm.spec.quantized.weight_form import expert_matrix

Act = Callable[[Tensor], Tensor]
"""What stands between an expert's two products, of gate and up together."""

Names = Callable[[int, str], str]
"""(an expert's number, "gate", "up" or "down") -> its tensor's name in the checkpoint."""

ROWS_AT_ONCE = 1024
"""Rows that experts in few bits, or beside an adapter, work on at once: those in few bits give 8 bytes a number."""


def rows_of_experts(weights_TK: Tensor, experts_TK: Tensor, first: int, count: int) -> Iterator[ExpertRows]:
    """The rows that go to the `count` experts from `first` on, `ROWS_AT_ONCE` at a time."""
    local = experts_TK.flatten() - first
    here = torch.where((local >= 0) & (local < count))[0]
    order = here[torch.argsort(local[here], stable=True)]
    for some in torch.split(order, ROWS_AT_ONCE):
        experts_N = local[some]
        bounds = first_rows(experts_N, count)
        yield ExpertRows(some // experts_TK.shape[1], experts_N, weights_TK.flatten()[some, None], bounds)


def first_rows(experts_N: Tensor, count: int) -> Tensor:
    """The first row of each of `count` experts, of rows in their order, and how many rows there are."""
    return torch.searchsorted(experts_N, torch.arange(count + 1, device=experts_N.device))


class ExpertProduct(nn.Module):
    """Stands for one of the two products of a layer's experts where adapters say what they add to it."""


class ExpertSum(nn.Module):
    """y_TD = sum over chosen experts of weight * expert(x), for the experts and widths held here.

    The result is a partial sum over the ranks, whichever way the experts are cut. The ranks of `ep` have other tokens
    each, and hold `holders[p]` of the experts for all of them.

    With weights in few bits it is in float64. A token's weight is then multiplied into what its expert's last product
    is given, and that product is made of multiples of 2^-30, whose sums over columns, experts and ranks are exact:
    neither their order nor the cut matters. Adapters may add to each expert's two products, `into` and `out`.
    """

    def __init__(self, holders: tuple[Range, ...], ep: Group) -> None:
        super().__init__()
        assert len(holders) == ep.size, "each rank of ep holds some of the experts"
        self.into, self.out = ExpertProduct(), ExpertProduct()
        self.holders, self.ep = holders, ep
        self.first, last = holders[ep.rank]
        self.count = last - self.first

    @abstractmethod
    def of_expert(self, x_TD: Tensor, *weights: Tensor | QuantizedWeight) -> Tensor:
        """What the expert with these weights, one of each stack, makes of rows."""

    @abstractmethod
    def products(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The weights of each expert's two products, of all experts held here: [experts, …] each."""

    def stacks(self) -> tuple[nn.Parameter, ...]:
        """All that experts are computed with; beside those of the products there may be biases."""
        return self.products()

    @abstractmethod
    def of_adapted(self, x_ND: Tensor, rows: ExpertRows, adapt: Adapt) -> Tensor:
        """What the experts make of their rows by plain numbers that are not trained, with what adapters add."""

    @abstractmethod
    def of_packed(
        self, x_ND: Tensor, rows: ExpertRows, into: QuantizedStack, out: QuantizedStack, adapt: Adapt
    ) -> Tensor:
        """In float64, what the experts whose products are `into` and `out` make of their rows, times the weights."""

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, adapt: Adapt = unadapted) -> Tensor:
        if self.ep.size == 1:
            return self.of_rows(x_TD, weights_TK, experts_TK, adapt)
        route = Route(experts_TK, self.holders, self.ep)
        return combine(self.of_rows(*dispatch(x_TD, weights_TK, experts_TK, route), adapt), route)

    def of_rows(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, adapt: Adapt = unadapted) -> Tensor:
        """The sum over the experts held here, of rows that are here."""
        into, out = (quantized_stack(stack) for stack in self.products())
        if into is not None and out is not None:
            y_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
            for rows in rows_of_experts(weights_TK, experts_TK, self.first, self.count):
                y_TD.index_add_(0, rows.tokens_N, self.of_packed(x_TD[rows.tokens_N], rows, into, out, adapt))
            return y_TD
        # Beside an adapter the experts themselves are frozen.
        if adapt is unadapted or self.products()[0].requires_grad:
            return self.of_plain(x_TD, weights_TK, experts_TK)
        y_TD = torch.zeros_like(x_TD)
        for rows in rows_of_experts(weights_TK, experts_TK, self.first, self.count):
            made_ND = (self.of_adapted(x_TD[rows.tokens_N], rows, adapt) * rows.weights_N1).to(y_TD.dtype)
            # One expert after another, as without an adapter: what a token gets of several is rounded in that order.
            for (_, tokens), (_, some_ND) in zip(rows.split(rows.tokens_N), rows.split(made_ND), strict=True):
                y_TD.index_add_(0, tokens, some_ND)
        return y_TD

    def of_plain(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The same of weights that are plain numbers, without an adapter."""
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
            made = self.of_expert(x_TD[tokens], *(expert_weight(stack, local) for stack in stacks))
            y_TD.index_add_(0, tokens, (made * weights_TK[tokens, places, None]).to(y_TD.dtype))
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

    def products(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.gate_up, self.down

    def of_expert(self, x_TD: Tensor, *weights: Tensor | QuantizedWeight) -> Tensor:
        gate_up, down = weights
        return matmul(self.act(matmul(x_TD, gate_up)), down)

    def of_packed(
        self, x_ND: Tensor, rows: ExpertRows, into: QuantizedStack, out: QuantizedStack, adapt: Adapt
    ) -> Tensor:
        y_NF = weighted(self.act(adapt(self.into, x_ND, into.matmul(x_ND, rows.first_rows), rows)), rows)
        return adapt(self.out, y_NF, out.matmul(y_NF, rows.first_rows, exact=True), rows)

    def of_adapted(self, x_ND: Tensor, rows: ExpertRows, adapt: Adapt) -> Tensor:
        def product(x_ND: Tensor, stack: Tensor) -> Tensor:
            return _by_expert(x_ND, rows, lambda some, number: matmul(some, expert_weight(stack, number)))

        h_NF = self.act(adapt(self.into, x_ND, product(x_ND, self.gate_up), rows))
        return adapt(self.out, h_NF, product(h_NF, self.down), rows)


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
            matrices = _matrices(piece.name, here, *source) if len(source) == 2 else ()
            shard = Shard((piece,), spread=ep.size > 1, plain=not matrices, matrices=matrices)
            return cut_parameter(tuple(b - a for a, b in box), shard)

        self.gate_up, self.gate_up_bias = stack("gate_up_proj", every, both), stack("gate_up_proj_bias", both)
        self.down = stack("down_proj", columns, every)
        self.down_bias = stack("down_proj_bias", every) if start == 0 else None
        self.act = act

    def stacks(self) -> tuple[nn.Parameter, ...]:
        held = self.gate_up, self.gate_up_bias, self.down
        return held if self.down_bias is None else (*held, self.down_bias)

    def products(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.gate_up, self.down

    def of_expert(self, x_TD: Tensor, *weights: Tensor | QuantizedWeight) -> Tensor:
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        assert len(plain) == len(weights), "both stacks of a layer have few bits in the files, or none"
        gate_up, gate_up_bias, down, *down_bias = plain
        y_TD = _transposed_matmul(self.act(_transposed_matmul(x_TD, gate_up, gate_up_bias)), down)
        return y_TD + down_bias[0] if down_bias else y_TD

    def of_packed(
        self, x_ND: Tensor, rows: ExpertRows, into: QuantizedStack, out: QuantizedStack, adapt: Adapt
    ) -> Tensor:
        y_NF = adapt(self.into, x_ND, into.matmul(x_ND, rows.first_rows), rows) + self.gate_up_bias[rows.experts_N]
        h_NF = weighted(self.act(y_NF), rows)
        y_ND = adapt(self.out, h_NF, out.matmul(h_NF, rows.first_rows, exact=True), rows)
        if self.down_bias is None:
            return y_ND
        return y_ND + on_grid(weighted(self.down_bias[rows.experts_N], rows))

    def of_adapted(self, x_ND: Tensor, rows: ExpertRows, adapt: Adapt) -> Tensor:
        def into(some: Tensor, number: int) -> Tensor:
            return _transposed_matmul(some, _plain(self.gate_up, number), self.gate_up_bias[number])

        def out(some: Tensor, number: int) -> Tensor:
            return _transposed_matmul(some, _plain(self.down, number))

        h_NF = self.act(adapt(self.into, x_ND, _by_expert(x_ND, rows, into), rows))
        y_ND = adapt(self.out, h_NF, _by_expert(h_NF, rows, out), rows)
        return y_ND if self.down_bias is None else y_ND + self.down_bias[rows.experts_N]


def weighted(x_NF: Tensor, rows: ExpertRows) -> Tensor:
    """Each row times its weight, in float32 at least."""
    return x_NF.to(torch.promote_types(x_NF.dtype, torch.float32)) * rows.weights_N1


def _plain(stack: Tensor, number: int) -> Tensor:
    """The weight of one expert, of a stack of plain numbers."""
    weight = expert_weight(stack, number)
    assert isinstance(weight, Tensor), "weights in few bits have a way of their own"
    return weight


def _transposed_matmul(x_TD: Tensor, weight_DF: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x W + b in x's dtype, of a weight that lies with its inputs first."""
    if not torch.is_grad_enabled() and is_batch_invariant(weight_DF):
        y_TF = invariant_matmul(x_TD, weight_DF.t())
        return (y_TF if bias_F is None else y_TF + bias_F).to(x_TD.dtype)
    if is_torch_held():
        y_TF = training_matmul(x_TD, weight_DF.t())
        return y_TF if bias_F is None else y_TF + bias_F
    return x_TD @ weight_DF if bias_F is None else torch.addmm(bias_F, x_TD, weight_DF)


def _by_expert(x_ND: Tensor, rows: ExpertRows, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """product(some rows, the number of their expert here) of each expert that has rows, one after another."""
    return torch.cat([product(some, number) for number, some in rows.split(x_ND)])


def _matrices(stack: str, experts: Range, inputs: Range, outputs: Range) -> tuple[ShardPiece, ...]:
    """What lies in a box of a stack, as a matrix of each expert."""
    inside = (0, outputs[1] - outputs[0]), (0, inputs[1] - inputs[0])
    return tuple(
        ShardPiece(expert_matrix(stack, expert), (outputs, inputs), ((local, local + 1), *inside))
        for local, expert in enumerate(range(*experts))
    )
