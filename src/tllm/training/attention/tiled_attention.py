"""Attention tile by tile, with a gradient: keys come in any order, and scores live only while a tile is computed.

For queries q, keys k and values v, with s = scale q k (capped) and p = exp(s - lse), lse = log sum exp s over all keys:

    out = p v                          kept as running sums under the largest score yet (2205.14135)
    dv = pᵀ do      dp = do vᵀ      ds = p (dp - do·out)      dq = scale ds k      dk = scale dsᵀ q

A sink is one more score s of a query, whose value is 0: it is in lse, and ds = -exp(s - lse) do·out.

Everything is in float32, or float64 of float64. Heads come first, query heads by the kv head that they share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tllm.model.attention import AttentionSpec
from tllm.training.attention.context_parallel import Tile, VisibleKeys
from tllm.training.state.tensor_blocks import update_dtype

Block = tuple[Tensor, Tensor]
"""Keys and values, or their gradients, of some tokens: [K, S, H] each, with K kv heads as queries share them."""


class Queries:
    """The queries at hand, which meet keys tile by tile."""

    def __init__(self, spec: AttentionSpec, sight: VisibleKeys, q_TNH: Tensor, kv_heads: int) -> None:
        self.spec, self.sight = spec, sight
        self.groups = q_TNH.shape[1] if spec.kv_index else kv_heads
        self.q_KGTH = self.by_group(q_TNH) * spec.scale

    def by_group(self, x_TNH: Tensor) -> Tensor:
        """What belongs to query heads, [K, G, T, H]."""
        tokens, heads, width = x_TNH.shape
        x_TKGH = x_TNH.to(update_dtype(x_TNH.dtype)).reshape(tokens, self.groups, heads // self.groups, width)
        return x_TKGH.permute(1, 2, 0, 3).contiguous()

    def of_heads(self, x_N: Tensor) -> Tensor:
        """A number for each query head, [K, G, 1]."""
        return x_N.to(self.q_KGTH.dtype).view(self.groups, -1, 1)

    def block(self, kv_2SKH: Tensor) -> Block:
        """Keys and values as the queries take them."""
        kv_2KSH = kv_2SKH.to(update_dtype(kv_2SKH.dtype)).transpose(1, 2)
        kv_2KSH = kv_2KSH[:, list(self.spec.kv_index)] if self.spec.kv_index else kv_2KSH.contiguous()
        return kv_2KSH[0], kv_2KSH[1]

    def scores(self, tile: Tile, k_KSH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of a tile [K, G, R, S], -inf where unseen; with a cap, what its tanh was."""
        q_KGRH = self.q_KGTH[:, :, tile.rows]
        scores_KGRS = product(q_KGRH, k_KSH[:, tile.keys].transpose(1, 2))
        bent_KGRS = None
        if self.spec.softcap is not None:
            bent_KGRS = scores_KGRS.div_(self.spec.softcap).tanh_()
            scores_KGRS = bent_KGRS * self.spec.softcap
        if tile.masked:
            scores_KGRS.masked_fill_(~self.sight.mask(tile), float("-inf"))
        return scores_KGRS, bent_KGRS


class OnlineSoftmax:
    """What the forward pass knows of each query while keys come."""

    def __init__(self, queries: Queries, sinks_N: Tensor | None = None) -> None:
        self.queries = queries
        q_KGTH = queries.q_KGTH
        self.out_KGTH = torch.zeros_like(q_KGTH)
        if sinks_N is not None:
            self.largest_KGT = queries.of_heads(sinks_N).expand(q_KGTH.shape[:3]).clone()
            self.total_KGT = torch.ones_like(self.largest_KGT)
            return
        # Not -inf: a tile in which a query sees nothing must leave it as it is, not make inf - inf of it.
        self.largest_KGT = torch.full_like(q_KGTH[..., 0], torch.finfo(q_KGTH.dtype).min)
        self.total_KGT = torch.zeros_like(self.largest_KGT)

    def meet(self, tiles: Sequence[Tile], block: Block) -> None:
        k_KSH, v_KSH = block
        for tile in tiles:
            scores_KGRS, _ = self.queries.scores(tile, k_KSH)
            largest_KGR = self.largest_KGT[:, :, tile.rows]
            top_KGR = torch.maximum(largest_KGR, scores_KGRS.amax(-1))
            shrink_KGR = (largest_KGR - top_KGR).exp_()
            chance_KGRS = scores_KGRS.sub_(top_KGR.unsqueeze(-1)).exp_()
            self.largest_KGT[:, :, tile.rows] = top_KGR
            self.total_KGT[:, :, tile.rows].mul_(shrink_KGR).add_(chance_KGRS.sum(-1))
            out_KGRH = self.out_KGTH[:, :, tile.rows]
            out_KGRH.mul_(shrink_KGR.unsqueeze(-1)).add_(product(chance_KGRS, v_KSH[:, tile.keys]))

    def done(self) -> tuple[Tensor, Tensor]:
        """The result and the logarithm of the sum of all exp(score)."""
        return self.out_KGTH / self.total_KGT.unsqueeze(-1), self.largest_KGT + self.total_KGT.log()


class Gradients:
    """What the backward pass knows of each query while keys come once more."""

    def __init__(self, queries: Queries, lse_KGT: Tensor, out_TNH: Tensor, of_out_TNH: Tensor) -> None:
        self.queries, self.lse_KGT = queries, lse_KGT
        self.of_out_KGTH = queries.by_group(of_out_TNH)
        self.met_KGT = (self.of_out_KGTH * queries.by_group(out_TNH)).sum(-1)
        self.of_q_KGTH = torch.zeros_like(queries.q_KGTH)

    def meet(self, tiles: Sequence[Tile], block: Block) -> Block:
        """The part that these queries have in the gradients of a block."""
        k_KSH, v_KSH = block
        of_k_KSH, of_v_KSH = torch.zeros_like(k_KSH), torch.zeros_like(v_KSH)
        for tile in tiles:
            k, v = k_KSH[:, tile.keys], v_KSH[:, tile.keys]
            chance_KGRS, bent_KGRS = self.queries.scores(tile, k_KSH)
            chance_KGRS.sub_(self.lse_KGT[:, :, tile.rows].unsqueeze(-1)).exp_()
            of_out_KGRH = self.of_out_KGTH[:, :, tile.rows]
            of_v_KSH[:, tile.keys] += product_over_rows(chance_KGRS, of_out_KGRH)
            of_scores_KGRS = product(of_out_KGRH, v.transpose(1, 2)).sub_(self.met_KGT[:, :, tile.rows].unsqueeze(-1))
            of_scores_KGRS.mul_(chance_KGRS)
            if bent_KGRS is not None:
                of_scores_KGRS.mul_(bent_KGRS.square_().neg_().add_(1))
            self.of_q_KGTH[:, :, tile.rows] += product(of_scores_KGRS, k)
            of_k_KSH[:, tile.keys] += product_over_rows(of_scores_KGRS, self.queries.q_KGTH[:, :, tile.rows])
        return of_k_KSH, of_v_KSH

    def joined(self, of_block: Block, kv_heads: int) -> Tensor:
        """Gradients of a block by its own kv heads, [2, S, K, H]."""
        of_kv_2KSH, index = torch.stack(of_block), self.queries.spec.kv_index
        if index:
            two, _, tokens, width = of_kv_2KSH.shape
            place = torch.tensor(index, device=of_kv_2KSH.device)
            of_kv_2KSH = of_kv_2KSH.new_zeros(two, kv_heads, tokens, width).index_add_(1, place, of_kv_2KSH)
        return of_kv_2KSH.transpose(1, 2)

    def of_sinks(self, sinks_N: Tensor) -> Tensor:
        """Gradients of the heads' sinks, for the queries at hand."""
        chance_KGT = (self.queries.of_heads(sinks_N) - self.lse_KGT).exp_()
        return (chance_KGT * self.met_KGT).sum(-1).neg_().flatten()

    @property
    def of_q_TNH(self) -> Tensor:
        return by_token(self.of_q_KGTH) * self.queries.spec.scale


def by_token(x_KGTH: Tensor) -> Tensor:
    """[K, G, T, H] as [T, N, H]."""
    return x_KGTH.flatten(0, 1).transpose(0, 1)


def product(x_KGRA: Tensor, y_KAB: Tensor) -> Tensor:
    """Of each query head's rows with what its kv head has: [K, G, R, B]."""
    return torch.bmm(x_KGRA.flatten(1, 2), y_KAB).view(*x_KGRA.shape[:3], y_KAB.shape[2])


def product_over_rows(x_KGRA: Tensor, y_KGRB: Tensor) -> Tensor:
    """The sum over a kv head's query heads and their rows: [K, A, B]."""
    return torch.bmm(x_KGRA.flatten(1, 2).transpose(1, 2), y_KGRB.flatten(1, 2))
