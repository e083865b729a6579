"""`HeadUpdate`: what an adapter adds where attention over latents multiplies by one head's rows of `kv_b_proj`."""

from __future__ import annotations

from torch import Tensor, nn

from tllm.kernels.batch_invariant import heads_matmul, is_batch_invariant
from tllm.parallel.linear import HeadLinear
from tllm.parallel.lora.lora_update import LoraModule, Rescale, tensor_names
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
        self.rows, self.each, self.scale = linear.rows, linear.each, module.scale
        self.is_transposed, self.is_invariant = linear.is_transposed, is_batch_invariant(linear.weight)
        self.rescale: Rescale | None = None

    def forward(self, x_TNA: Tensor) -> Tensor:
        first, last = self.rows
        b_NHR = self.B.unflatten(0, (-1, self.each))[:, first:last]  # type: ignore[no-untyped-call]
        a_NRD = self.A.expand(len(b_NHR), -1, -1)
        ways = (b_NHR.transpose(1, 2), a_NRD.transpose(1, 2)) if self.is_transposed else (a_NRD, b_NHR)
        for weight in ways:
            x_TNA = heads_matmul(x_TNA, weight, self.is_invariant)
        return x_TNA * self.scale
