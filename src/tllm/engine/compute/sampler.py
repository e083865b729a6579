"""Chooses tokens from logits; a choice depends on its logits, its sampling and its position, on nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tllm.engine.schedule.batch import Sampling
from tllm.spec.request import TokenLogprobs

REACH = 21.0
"""No noise lifts a token over one whose score is so much higher: `noise` lies between -2.86 and 17.33."""

NUCLEUS_DEPTHS = (4.0, 10.0, math.inf)
"""How far below the best score top-p looks for its tokens, until it has found them; the last is everywhere."""


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of its sequence, 0 being the first of the prompt.

    A draw is a race (the Gumbel-max trick): each token's score plus noise of its own, the highest wins. The noise
    follows from (seed, position, token), so that a reply does not depend on what else is in the batch, on how the
    model is cut, or on where it was broken off and resumed.
    """
    scores_V = altered(logits_V, sampling)
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    # Taking the maximum off first keeps a tiny temperature from overflowing.
    scores_V = (scores_V - scores_V.max()) / sampling.temperature
    ids_C = kept(scores_V, sampling)
    race_C = scores_V[ids_C].double() + noise(ids_C, sampling.seed, position)
    return int(ids_C[race_C.argmax()])


def noise(ids_C: Tensor, seed: int, position: int) -> Tensor:
    """A standard Gumbel number for each token: 24 well-stirred bits of (seed, position, token) as a uniform one."""
    start = _signed(_splitmix(_splitmix(seed % 2**64) ^ position))
    x = ids_C * _signed(GOLDEN) + start
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    uniform_C = (_shifted(x, 40).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform_C))


GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(x: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014); `noise` takes the same step for many tokens at once."""
    x = (x + GOLDEN) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The same 64 bits as torch's signed integers hold them; their products wrap around alike."""
    return x - 2**64 if x >= 2**63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros coming in, where torch would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def altered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Logits after penalties, bias and bans; the same tensor where there are none."""
    if not (sampling.history or sampling.logit_bias or sampling.banned):
        return logits_V
    scores_V = logits_V.clone()
    if sampling.history:
        _penalise(scores_V, sampling)
    if sampling.logit_bias:
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=scores_V.dtype)
        scores_V[torch.tensor(list(sampling.logit_bias))] += bias
    if sampling.banned:
        scores_V[torch.tensor(sampling.banned)] = -math.inf
    return scores_V


def _penalise(scores_V: Tensor, sampling: Sampling) -> None:
    """Repetition over prompt and output (1909.05858); frequency and presence over the output, as OpenAI has them."""
    seen = torch.tensor(sampling.history)
    if sampling.repetition_penalty != 1.0:
        ids = torch.unique(seen)
        of_seen = scores_V[ids]
        factor = sampling.repetition_penalty
        scores_V[ids] = torch.where(of_seen > 0, of_seen / factor, of_seen * factor)
    ids, counts = torch.unique(seen[sampling.prompt_length :], return_counts=True)
    if len(ids):
        scores_V[ids] -= sampling.frequency_penalty * counts.to(scores_V.dtype) + sampling.presence_penalty


def kept(scores_V: Tensor, sampling: Sampling) -> Tensor:
    """Ids that min-p, top-k and top-p leave, in order; ones as likely as the last one left stay too.

    `scores_V` are logits over the temperature, with 0 for the likeliest. Ids that could never win are left out.
    """
    floor = -REACH
    if sampling.min_p > 0:
        floor = max(floor, math.log(sampling.min_p))
    if 0 < sampling.top_k < scores_V.shape[0]:
        floor = max(floor, float(scores_V.topk(sampling.top_k).values[-1]))
    if sampling.top_p < 1:
        # Of all tokens, but for what min-p and top-k have shut out.
        shut = sampling.min_p > 0 or sampling.top_k > 0
        among = scores_V[scores_V >= floor] if shut else scores_V
        floor = max(floor, _nucleus_floor(among, sampling.top_p))
    return (scores_V >= floor).nonzero().squeeze(1)


def _nucleus_floor(scores_V: Tensor, top_p: float) -> float:
    """The score of the last of the likeliest tokens that make up `top_p` together (1904.09751)."""
    total = torch.logsumexp(scores_V, 0)
    for depth in NUCLEUS_DEPTHS:
        best = scores_V[scores_V >= -depth].sort(descending=True).values
        before = (best - total).exp().cumsum(0)
        short = int((before < top_p).sum())  # after how many tokens there is still too little
        if short < len(best):
            return float(best[short])
    return -math.inf


def scored(logits_V: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """A token's log-probability under the model itself, and those of the `top` likeliest."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    values, ids = logprobs_V.topk(min(top, logprobs_V.shape[0]))
    likeliest = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, float(logprobs_V[token_id]), tuple(likeliest))
