"""`TrainAttend`: attention over packed documents, with gradients, which computes no scores that the mask hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.training.causal_attention import causal_attention
from tllm.model.attention import Attend, AttentionSpec
from tllm.model.recurrence import Advance, recur_afresh
from tllm.training.attention import kernel_attention
from tllm.training.attention.attention_dtype import attention_dtype
from tllm.training.data.batch_tensors import Tokens

MakeAttend = Callable[[dict[int, AttentionSpec], Tokens], Attend]
"""(the attention spec of each layer, a microbatch) -> its attention, for one pass over the layers."""

ROWS_AT_ONCE = 256
"""Queries that a window narrower than this takes together; a wider one takes as many as it is wide. So many also of a
document with a prefix, as no kernel knows its mask: of the keys after its own, a block's query meets this many at most.
"""


@dataclass(frozen=True)
class DocumentRun:
    """So many documents of one length that follow one another; all of them see the keys of run `prefix` first, which is
    one document, if it is not None."""

    length: int
    count: int
    prefix: int | None = None


class TrainAttend:
    """Causal attention inside each document of a microbatch, which is here as a whole, and over its prefix.

    By the kernel all documents are one call (`kernel_attention`); else those of one length that follow one another. A
    window costs tokens times window, not the square.
    """

    def __init__(self, specs: dict[int, AttentionSpec], tokens: Tokens) -> None:
        assert tokens.spans is None, "a part of a microbatch is attended over by a ring"
        self.specs, self.lengths, self.is_shared = specs, tokens.lengths, bool(tokens.prefixes)
        self.runs = document_runs(tokens)
        self.tokens = [run.length * run.count for run in self.runs]

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        spec = self.specs[layer]
        if spec.kv_index is not None:
            k_TKH, v_TKH = k_TKH[:, list(spec.kv_index)], v_TKH[:, list(spec.kv_index)]
        is_plain = sinks_N is None and not self.is_shared
        if is_plain and kernel_attention.takes(spec, self.lengths, q_TNH, k_TKH, v_TKH):
            return causal_attention(q_TNH, k_TKH, v_TKH, self.lengths, spec.scale, spec.window)
        attend = _plain if spec.softcap is None and sinks_N is None else partial(_written_out, sinks_N)
        outs = []
        q_R, k_R, v_R = (self._by_run(x) for x in (q_TNH, k_TKH, v_TKH))
        for at, (run, q_BNTH) in enumerate(zip(self.runs, q_R, strict=True)):
            k_BKSH, v_BKSH = self._seen(at, k_R), self._seen(at, v_R)
            length = k_BKSH.shape[2]
            first = length - run.length
            blocks = [
                attend(
                    spec,
                    q_BNTH[:, :, start - first : stop - first],
                    k_BKSH[:, :, low:stop],
                    v_BKSH[:, :, low:stop],
                    start - low,
                )
                for start, stop, low in _blocks(first, length, spec.window)
            ]
            o_BNTH = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
            outs.append(o_BNTH.transpose(1, 2).flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Each document begins without a state; those of one length that follow one another are advanced together."""
        assert all(run.prefix is None for run in self.runs), "a state is not taken from one document to another"
        return recur_afresh([(run.count, run.length) for run in self.runs], advance, *rows)

    def _by_run(self, x_TNH: Tensor) -> list[Tensor]:
        """[count, N, length, H] of each run."""
        parts = zip(self.runs, torch.split(x_TNH, self.tokens), strict=True)
        return [x.view(run.count, run.length, *x.shape[1:]).transpose(1, 2) for run, x in parts]

    def _seen(self, at: int, x_R: list[Tensor]) -> Tensor:
        """Keys or values that each document of run `at` sees, [count, K, S, H]: its prefix's, and its own."""
        own_BKTH, prefix = x_R[at], self.runs[at].prefix
        if prefix is None:
            return own_BKTH
        return torch.cat((x_R[prefix].expand(len(own_BKTH), -1, -1, -1), own_BKTH), dim=2)


def document_runs(tokens: Tokens) -> list[DocumentRun]:
    """The documents of a microbatch, as many at once as are alike; one that others see is a run of its own."""
    prefixes = tokens.prefixes or (None,) * len(tokens.lengths)
    seen = set(prefixes) - {None}
    kinds = [(tokens.lengths[n], prefixes[n], n if n in seen else None) for n in range(len(prefixes))]
    runs: list[DocumentRun] = []
    run_of = dict[int, int]()
    for (length, prefix, own), same in groupby(kinds):
        if own is not None:
            run_of[own] = len(runs)
        runs.append(DocumentRun(length, len(list(same)), None if prefix is None else run_of[prefix]))
    return runs


def _blocks(first: int, length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """Queries [start, stop) of a document from its token `first` on, and the first key that they see."""
    if window is None or window >= length:
        seen, rows = length, ROWS_AT_ONCE if first else length
    else:
        seen, rows = window, max(window, ROWS_AT_ONCE)
    for start in range(first, length, rows):
        yield start, min(start + rows, length), max(0, start - seen + 1)


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
    keys = before + q_BNTH.shape[2]
    window = keys if spec.window is None else min(spec.window, keys)
    if before == 0 and window == keys:
        return None
    place_T = torch.arange(before, keys, device=q_BNTH.device)
    distance_TS = place_T[:, None] - torch.arange(keys, device=q_BNTH.device)
    return (distance_TS >= 0) & (distance_TS < window)
