"""The slow twin of the engine's sampler: a token and log-probabilities of one row of logits at a time, [V]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tllm.engine.schedule.batch import Sampling
from tllm.engine.schedule.grammar_state import unpack_mask
from tllm.spec.request import TokenLogprobs

GUMBEL_SPREAD = 21.0
"""Gumbel noise of 24-bit uniform numbers lies between -2.86 and 17.33: a token whose score is this much below the best
one's cannot be drawn."""

NUCLEUS_DEPTHS = (4.0, 10.0, math.inf)
"""How far below the best score top-p sorts tokens: it tries one after the other, until it has enough tokens."""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The increment of splitmix64."""


def apply_penalties(logits_V: Tensor, sampling: Sampling) -> Tensor:
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
    history = torch.tensor(sampling.history)
    if sampling.repetition_penalty != 1.0:
        ids = torch.unique(history)
        scores = scores_V[ids]
        factor = sampling.repetition_penalty
        scores_V[ids] = torch.where(scores > 0, scores / factor, scores * factor)
    ids, counts = torch.unique(history[sampling.prompt_length :], return_counts=True)
    if len(ids):
        scores_V[ids] -= sampling.frequency_penalty * counts.to(scores_V.dtype) + sampling.presence_penalty


def candidates(scores_V: Tensor, sampling: Sampling) -> Tensor:
    """Ids that min-p, then top-k, then top-p leave, in order; ids as likely as the last one left stay too.

    `scores_V` are logits divided by the temperature, with 0 for the most likely token. Ids that no noise could make
    the winner (`GUMBEL_SPREAD`) are left out as well.
    """
    floor = -GUMBEL_SPREAD
    if sampling.min_p > 0:
        floor = max(floor, math.log(sampling.min_p))
    if 0 < sampling.top_k < scores_V.shape[0]:
        floor = max(floor, float(scores_V.topk(sampling.top_k).values[-1]))
    if sampling.top_p < 1:
        # top_p is a part of all tokens' probability, but for those that min-p and top-k have excluded.
        is_narrowed = sampling.min_p > 0 or sampling.top_k > 0
        remaining = scores_V[scores_V >= floor] if is_narrowed else scores_V
        floor = max(floor, _nucleus_floor(remaining, sampling.top_p))
    return (scores_V >= floor).nonzero().squeeze(1)


def _nucleus_floor(scores_V: Tensor, top_p: float) -> float:
    """The score of the last of the likeliest tokens that together have the probability `top_p` (1904.09751)."""
    total = torch.logsumexp(scores_V, 0)
    for depth in NUCLEUS_DEPTHS:
        best = scores_V[scores_V >= -depth].sort(descending=True).values
        cumulated = (best - total).exp().cumsum(0)
        too_few = int((cumulated < top_p).sum())  # so many tokens do not have it together yet
        if too_few < len(best):
            return float(best[too_few])
    return -math.inf


def gumbel_noise(ids_C: Tensor, seed: int, position: int) -> Tensor:
    """A standard Gumbel number for each token, from 24 bits of splitmix64 over (seed, position, token) as a uniform."""
    start = _signed(_splitmix(_splitmix(seed % 2**64) ^ position))
    x = ids_C * _signed(GOLDEN_GAMMA) + start
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift_right(x, 31)
    uniform_C = (_shift_right(x, 40).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform_C))


def _splitmix(x: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014); `gumbel_noise` takes the same step for many tokens at once."""
    x = (x + GOLDEN_GAMMA) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The same 64 bits as torch's signed integers hold them; their products wrap around alike."""
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros coming in, where torch would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample_token(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` of its sequence, 0 being the first of the prompt.

    It is drawn by the Gumbel-max trick: each token's score plus Gumbel noise of its own, and the highest sum wins.
    The noise follows from (seed, position, token), so that a reply does not depend on what else is in the batch, on
    how the model is cut, or on where it was broken off and resumed.
    """
    scores_V = apply_penalties(logits_V, sampling)
    if sampling.mask:
        scores_V = masked(scores_V, sampling.mask)
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scores_V = (scores_V - scores_V.max()) / sampling.temperature
    ids_C = candidates(scores_V, sampling)
    noisy_C = scores_V[ids_C].double() + gumbel_noise(ids_C, sampling.seed, position)
    return int(ids_C[noisy_C.argmax()])


def token_logprobs(logits_V: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """A token's log-probability under the model itself, and those of the `top` likeliest tokens."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    values, ids = logprobs_V.topk(min(top, logprobs_V.shape[0]))
    likeliest = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    rank = 1 + sum(value > logprobs_V[token_id] for value in logprobs_V)
    return TokenLogprobs(token_id, float(logprobs_V[token_id]), tuple(likeliest), int(rank))


def masked(scores_V: Tensor, mask: bytes) -> Tensor:
    """Minus infinity for each token that the packed mask does not allow."""
    allowed = int.from_bytes(unpack_mask(mask, len(scores_V)), "little")
    return torch.tensor([score if allowed >> token & 1 else -math.inf for token, score in enumerate(scores_V.tolist())])
