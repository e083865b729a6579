"""`HeadUpdate`: what an adapter adds where attention over latents multiplies by one head's rows of `kv_b_proj`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from tllm.kernels.batch_invariant import is_batch_invariant
from tllm.parallel.linear import HeadLinear, heads_product
from tllm.parallel.lora.lora_update import Factor, LoraModule, Span, magnitude_name, tensor_names
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter


class HeadUpdate(nn.Module):
    """x_TNA -> what W + scale B A makes more of x than W, [T, N, B], for the rows of a head that `linear` has.

    With B_n, those rows of B: keys' queries get scale (x B_n) A, and values scale B_n (A x). Keys and values have one
    A and one B: the second of them takes those of `other`.
    """

    def __init__(self, linear: HeadLinear, module: LoraModule, other: HeadUpdate | None) -> None:
        super().__init__()
        (first, last), (name_A, name_B), rank = linear.heads, tensor_names(linear.name), module.rank
        width, held = linear.weight.shape[2], (last - first) * linear.each
        if other is None:
            rows, every = (first * linear.each, last * linear.each), (0, rank)
            whole = ShardPiece(name_A, (every, (0, width)), (every, (0, width)))
            self.A = cut_parameter((rank, width), Shard((whole,), True, "partial"))
            self.B = cut_parameter((held, rank), Shard((ShardPiece(name_B, (rows, every), ((0, held), every)),)))
        else:
            self.A, self.B = other.A, other.B
        self.rows, self.heads, self.name = linear.rows, linear.heads, linear.name
        self.outputs = (last - first) * (linear.rows[1] - linear.rows[0])
        self.spans = [Span(0, self.outputs, 0, rank, module.scale)]
        self.is_transposed, self.is_invariant = linear.is_transposed, is_batch_invariant(linear.weight)
        self.factor: Factor | None = None

    def forward(self, x_TNA: Tensor) -> Tensor:
        b_NBR = self._rows_of_heads()
        a_NRD = self.A.expand(len(b_NBR), -1, -1)
        ways = (b_NBR.transpose(1, 2), a_NRD.transpose(1, 2)) if self.is_transposed else (a_NRD, b_NBR)
        for weight in ways:
            x_TNA = heads_product(x_TNA, weight, self.is_invariant)
        return x_TNA * self.spans[0].scale

    def rescaled(self, factor_F: Tensor, weight: Tensor, x_TNA: Tensor, product_TNB: Tensor) -> Tensor:
        """What is added to what `weight` [N, B, width] gives, `product_TNB`, where each of its rows is multiplied by a
        factor (DoRA): rows are outputs for values, and for keys what queries, the inputs, meet."""
        factor_NB: Tensor = factor_F.unflatten(0, (len(weight), -1))  # type: ignore[no-untyped-call]
        added_TNB: Tensor
        if not self.is_transposed:
            added_TNB = factor_NB * self(x_TNA) + (factor_NB - 1) * product_TNB
            return added_TNB
        more_TNB = heads_product(((factor_NB - 1) * x_TNA).to(weight.dtype), weight.transpose(1, 2), self.is_invariant)
        added_TNB = self((factor_NB * x_TNA).to(x_TNA.dtype)) + more_TNB
        return added_TNB

    def rows_of_B(self) -> list[Tensor]:
        """B of the rows, one head after another."""
        return [self._rows_of_heads().flatten(0, 1)]

    def magnitudes(self) -> Iterator[nn.Parameter]:
        """DoRA's magnitudes of the rows, one head after another, without values."""
        low, high = self.rows
        name, each = magnitude_name(self.name), self._each
        pieces = [
            ShardPiece(
                name, ((head * each + low, head * each + high),), ((at * (high - low), (at + 1) * (high - low)),)
            )
            for at, head in enumerate(range(*self.heads))
        ]
        yield cut_parameter((self.outputs,), Shard(tuple(pieces)))

    @property
    def _each(self) -> int:
        """Rows of B that a head has, of keys and values."""
        return len(self.B) // (self.heads[1] - self.heads[0])

    def _rows_of_heads(self) -> Tensor:
        b_NHR: Tensor = self.B.unflatten(0, (-1, self._each))  # type: ignore[no-untyped-call]
        return b_NHR[:, self.rows[0] : self.rows[1]]
