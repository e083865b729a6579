"""Chooses tokens from logits; a choice depends on its logits, its sampling and its position, on nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tllm.engine.batch import Sampling
from tllm.spec.request import TokenLogprobs

CANDIDATES = 1024
"""Enough likeliest tokens that top-p seldom has to sort the whole vocabulary."""


class Sampler:
    """Draws by a race (the Gumbel-max trick): each token's chance over an exponential number, the highest wins.

    The numbers come from a generator seeded with (seed, position), so that a reply does not depend on what else is in
    the batch, on how the model is cut, or on where it was broken off and resumed.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def choose(self, logits_V: Tensor, sampling: Sampling, position: int) -> int:
        """The token at `position` of its sequence, 0 being the first of the prompt."""
        scores_V = altered(logits_V, sampling)
        if sampling.temperature == 0:
            return int(scores_V.argmax())
        # Taking the maximum off first keeps a tiny temperature from overflowing.
        scores_V = kept((scores_V - scores_V.max()) / sampling.temperature, sampling)
        self._generator.manual_seed(mix(sampling.seed, position))
        race_V = torch.empty(scores_V.shape, dtype=torch.float32).exponential_(generator=self._generator)
        return int((scores_V - race_V.log_()).argmax())


def mix(seed: int, position: int) -> int:
    """63 well-stirred bits of (seed, position): splitmix64 (Steele, Lea, Flood 2014), once for each."""
    return _splitmix(_splitmix(seed % 2**64) ^ position) >> 1


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


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
    """-inf for tokens that min-p, top-k or top-p shut out. Tokens as likely as the last one kept stay too."""
    floor = -math.inf
    if sampling.min_p > 0:
        floor = float(scores_V.max()) + math.log(sampling.min_p)
    if 0 < sampling.top_k < scores_V.shape[0]:
        floor = max(floor, float(scores_V.topk(sampling.top_k).values[-1]))
    if floor > -math.inf:
        scores_V = scores_V.masked_fill(scores_V < floor, -math.inf)
    if sampling.top_p < 1:
        scores_V = scores_V.masked_fill(scores_V < _nucleus_floor(scores_V, sampling.top_p), -math.inf)
    return scores_V


def _nucleus_floor(scores_V: Tensor, top_p: float) -> float:
    """The score of the last of the likeliest tokens that make up `top_p` together (1904.09751)."""
    total = torch.logsumexp(scores_V, 0)
    for count in (min(CANDIDATES, scores_V.shape[0]), scores_V.shape[0]):
        best = scores_V.topk(count).values
        before = (best - total).exp().cumsum(0)
        inside = int((before < top_p).sum())  # tokens after whose addition there is still too little
        if inside < count:
            return float(best[inside])
    return -math.inf


def scored(logits_V: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """A token's log-probability under the model itself, and those of the `top` likeliest."""
    logprobs_V = torch.log_softmax(logits_V, -1)
    values, ids = logprobs_V.topk(min(top, logprobs_V.shape[0]))
    likeliest = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, float(logprobs_V[token_id]), tuple(likeliest))
