"""`TrainAttend`: attention over packed documents that has a gradient and never writes out scores that nobody sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.model.attention import Attend, AttentionSpec
from tllm.model.recurrence import Advance, recur_afresh
from tllm.training.attention.attention_dtype import attention_dtype
from tllm.training.data.batch_tensors import Tokens

MakeAttend = Callable[[dict[int, AttentionSpec], Tokens], Attend]
"""(the attention spec of each layer, a microbatch) -> its attention, for one pass over the layers."""

ROWS_AT_ONCE = 256
"""Queries that a window narrower than this takes together; a wider one takes as many as it is wide."""


class TrainAttend:
    """Causal attention inside each document of a microbatch, which is here as a whole.

    Documents of one length that follow one another are one call. A window costs tokens times window, not the square.
    """

    def __init__(self, specs: dict[int, AttentionSpec], tokens: Tokens) -> None:
        assert tokens.spans is None, "a part of a microbatch is attended over by a ring"
        self.specs = specs
        self.runs = [(length, len(list(same))) for length, same in groupby(tokens.lengths)]
        self.tokens = [length * count for length, count in self.runs]

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        spec = self.specs[layer]
        if spec.kv_index is not None:
            k_TKH, v_TKH = k_TKH[:, list(spec.kv_index)], v_TKH[:, list(spec.kv_index)]
        attend = _plain if spec.softcap is None and sinks_N is None else partial(_written_out, sinks_N)
        outs = []
        parts = zip(*(torch.split(x, self.tokens) for x in (q_TNH, k_TKH, v_TKH)), strict=True)
        for (length, count), qkv in zip(self.runs, parts, strict=True):
            q_BNTH, k_BKTH, v_BKTH = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            blocks = [
                attend(spec, q_BNTH[:, :, start:stop], k_BKTH[:, :, low:stop], v_BKTH[:, :, low:stop], start - low)
                for start, stop, low in _blocks(length, spec.window)
            ]
            o_BNTH = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
            outs.append(o_BNTH.transpose(1, 2).flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Each document begins without a state; those of one length that follow one another are advanced together."""
        return recur_afresh([(count, length) for length, count in self.runs], advance, *rows)


def _blocks(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """Queries [start, stop) of a document and the first key that they see."""
    if window is None or window >= length:
        yield 0, length, 0
        return
    rows = max(window, ROWS_AT_ONCE)
    for start in range(0, length, rows):
        yield start, min(start + rows, length), max(0, start - window + 1)


def _plain(spec: AttentionSpec, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, before: int) -> Tensor:
    """`before`: how many of the keys come before the first query."""
    mask, within = _mask(spec, q_BNTH, before), attention_dtype(q_BNTH.dtype)
    return F.scaled_dot_product_attention(
        q_BNTH.to(within),
        k_BKSH.to(within),
        v_BKSH.to(within),
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
    ).to(q_BNTH.dtype)


def _written_out(
    sinks_N: Tensor | None, spec: AttentionSpec, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, before: int
) -> Tensor:
    """Scores in memory, capped by tanh or with sinks; softmax in float32 at least, as such models are trained."""
    rows = q_BNTH.shape[2]
    mask = _mask(spec, q_BNTH, before)
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=q_BNTH.device).tril()
    B, N, _, H = q_BNTH.shape
    K = k_BKSH.shape[1]
    q_BKGTH = q_BNTH.reshape(B, K, N // K, rows, H)
    scores_BKGTS = torch.matmul(q_BKGTH, k_BKSH.unsqueeze(2).transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores_BKGTS = torch.tanh(scores_BKGTS / spec.softcap) * spec.softcap
    scores_BKGTS, keys = scores_BKGTS.masked_fill(~mask, float("-inf")), k_BKSH.shape[2]
    if sinks_N is not None:
        sinks_BKGT1 = sinks_N.view(K, -1, 1, 1).expand(B, -1, -1, rows, 1)
        scores_BKGTS = torch.cat((scores_BKGTS, sinks_BKGT1), -1)
    wide = torch.float64 if q_BNTH.dtype == torch.float64 else torch.float32
    chance_BKGTS = scores_BKGTS.softmax(-1, dtype=wide)[..., :keys].to(q_BNTH.dtype)
    return torch.matmul(chance_BKGTS, v_BKSH.unsqueeze(2)).flatten(1, 2)


def _mask(spec: AttentionSpec, q_BNTH: Tensor, before: int) -> Tensor | None:
    """Which keys each query sees; None where it is all that came before, and nothing but a triangle."""
    rows = q_BNTH.shape[2]
    if before == 0 and (spec.window is None or spec.window >= rows):
        return None
    assert spec.window is not None, "without a window a document is one block"
    place_T = torch.arange(before, before + rows, device=q_BNTH.device)
    distance_TS = place_T[:, None] - torch.arange(before + rows, device=q_BNTH.device)
    return (distance_TS >= 0) & (distance_TS < spec.window)
