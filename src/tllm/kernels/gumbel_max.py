"""`gumbel_max`: a token of each row of logits, drawn by the Gumbel-max trick: to the score of each token comes Gumbel
noise of its own, and the highest sum wins.

The noise follows from (seed, position, token) alone, and what decides about a row is summed up in an order of its own
or in integers. So a token does not depend on what other rows there are. On the processor the kernel draws
(csrc/gumbel_max.c), elsewhere torch, on the device of the logits.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.kernels.library import LANES, DrawArguments, Library, kernel_threads, kernels_for
from tllm.kernels.splitmix64 import GOLDEN_GAMMA, most_mixed, shift_right, splitmix64

ELEMENTS_AT_ONCE = 2**22
"""Logits of the rows that torch draws from together, which bounds the memory that it takes."""

UNIFORM_BITS = 24
"""Of SplitMix64's output those that make a uniform number: the first ones."""

RACE_SPREAD = 17.5
"""The most by which a token's race can mislead (see `_races`): 17.33 for 24 bits, and far more than is rounded."""

WEIGHT = 2.0**44
"""What the likeliest token weighs where top-p sums up probabilities: 2^18 such tokens fit into an int64."""


class Draws(NamedTuple):
    """How a token is drawn of each row, on the device of the logits; each [R, 1].

    Scores are (logit - the row's largest) / temperature. `least` is the least score that may be drawn, minus infinity
    for all; it is None where no row has one. `top_p` leaves the likeliest of these that have such a part of their
    probability together (1904.09751), and tokens as likely as the last one; it is None where all rows have 1.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    least: Tensor | None = None
    top_p: Tensor | None = None

    def rows(self, start: int, stop: int) -> Draws:
        """Those of a range of rows."""
        least, top_p = (None if x is None else x[start:stop] for x in (self.least, self.top_p))
        return Draws(self.temperatures[start:stop], self.seeds[start:stop], self.positions[start:stop], least, top_p)


def gumbel_max(logits_RV: Tensor, draws: Draws) -> Tensor:
    """The ids [R] of the tokens; V of a row that has a NaN or plus infinity, or no finite number. All but the whole
    numbers of `draws` is float64."""
    kernels = kernels_for(logits_RV) if logits_RV.dtype == torch.float32 else None
    if kernels is not None:
        return _by_kernel(kernels, logits_RV, draws)
    rows = max(1, ELEMENTS_AT_ONCE // logits_RV.shape[1])
    starts = range(0, len(logits_RV), rows)
    return torch.cat([_by_torch(logits_RV[at : at + rows], draws.rows(at, at + rows)) for at in starts])


def _by_kernel(kernels: Library, logits_RV: Tensor, draws: Draws) -> Tensor:
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    (rows, width), threads = logits_RV.shape, kernel_threads()
    ids_R = torch.empty(rows, dtype=torch.int64)
    scratch = torch.empty(threads * -(-width // LANES) * LANES)
    least = torch.full((rows, 1), -torch.inf, dtype=torch.float64) if draws.least is None else draws.least
    top_p = torch.ones(rows, 1, dtype=torch.float64) if draws.top_p is None else draws.top_p
    held = {
        "logits": logits_RV,
        "temperatures": draws.temperatures.contiguous(),
        "least": least.contiguous(),
        "top_p": top_p.contiguous(),
        "seeds": draws.seeds.contiguous(),
        "positions": draws.positions.contiguous(),
        "scratch": scratch,
        "ids": ids_R,
    }
    addresses = {name: x.data_ptr() for name, x in held.items()}
    arguments = DrawArguments(**addresses, rows=rows, width=width, stride=logits_RV.stride(0))
    kernels.gumbel_max(ctypes.byref(arguments), threads)
    return ids_R


def _by_torch(logits_RV: Tensor, draws: Draws) -> Tensor:
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scores_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).div_(draws.temperatures.to(logits_RV.dtype))
    starts_R1 = noise_starts(draws.seeds, draws.positions)
    races_RV = _races(scores_RV, starts_R1)
    is_out_RV = None if draws.least is None else scores_RV < draws.least.to(scores_RV.dtype)
    if is_out_RV is not None:
        races_RV.masked_fill_(is_out_RV, 0)
    ids_R = _winners(races_RV, scores_RV, starts_R1)
    if draws.top_p is None:
        return ids_R
    weights_RV = scores_RV.exp().mul_(WEIGHT).long()
    if is_out_RV is not None:
        weights_RV.masked_fill_(is_out_RV, 0)
    limit_R = draws.top_p[:, 0] * weights_RV.sum(-1)
    while True:
        # Top-p leaves a token if those that are likelier have less than its part together. So each winner is asked
        # whether it is left, and where it is not, there is another among those that are likelier.
        winners_R1 = scores_RV.gather(1, ids_R.clamp(max=scores_RV.shape[1] - 1)[:, None])
        above_R = weights_RV.masked_fill(scores_RV <= winners_R1, 0).sum(-1)
        rows_N = ((above_R > 0) & (above_R >= limit_R)).nonzero()[:, 0]
        if not len(rows_N):
            return ids_R
        races_NV = races_RV[rows_N].masked_fill_(scores_RV[rows_N] <= winners_R1[rows_N], 0)
        ids_R[rows_N] = _winners(races_NV, scores_RV[rows_N], starts_R1[rows_N])
        races_RV[rows_N] = races_NV


def _races(scores_RV: Tensor, starts_R1: Tensor) -> Tensor:
    """Of each token p / v in float32, with p = e^score, and v = 1 - u for the uniform number u of its noise.

    Score and noise of a token are the logarithm of p / -log(u), which lies between p / v / 17.33 and p / v for every
    u of 24 bits. So this tells without a logarithm which few tokens can win.
    """
    steps_V = torch.arange(scores_RV.shape[1], device=scores_RV.device) * GOLDEN_GAMMA
    bits_RV = _uniform_bits(steps_V + starts_R1)
    # In this order nothing is rounded where v is small.
    v_RV = bits_RV.to(torch.float32).neg_().add_(2.0**UNIFORM_BITS - 1).add_(0.5)
    return scores_RV.float().exp().div_(v_RV)


def _winners(races_RV: Tensor, scores_RV: Tensor, starts_R1: Tensor) -> Tensor:
    """The first token of each row with the largest sum of score and noise, of those whose race is near the best."""
    rows, vocab_size = races_RV.shape
    enough_R1 = races_RV.amax(-1, keepdim=True).div_(RACE_SPREAD).clamp_(min=torch.finfo(torch.float32).tiny)
    rows_C, ids_C = (races_RV >= enough_R1).nonzero().unbind(1)
    noisy_C = scores_RV[rows_C, ids_C].double() + gumbel_noise(ids_C, starts_R1[rows_C, 0])
    most_R = torch.full((rows,), -torch.inf, dtype=torch.float64, device=races_RV.device)
    most_R.scatter_reduce_(0, rows_C, noisy_C, "amax")
    firsts_C = ids_C.masked_fill(noisy_C < most_R[rows_C], vocab_size)
    return torch.full((rows,), vocab_size, device=races_RV.device).scatter_reduce_(0, rows_C, firsts_C, "amin")


def gumbel_noise(ids: Tensor, starts: Tensor) -> Tensor:
    """A standard Gumbel number for each token, from 24 bits of SplitMix64 over (seed, position, token) as a uniform."""
    uniform = (_uniform_bits(ids * GOLDEN_GAMMA + starts).double() + 0.5) / 2**UNIFORM_BITS
    return -torch.log(-torch.log(uniform))


def noise_starts(seeds: Tensor, positions: Tensor) -> Tensor:
    """What the noise of all tokens at a position follows from, of a sequence with this seed."""
    mixed = splitmix64(seeds + GOLDEN_GAMMA) ^ positions
    return splitmix64(mixed + GOLDEN_GAMMA)


def _uniform_bits(states: Tensor) -> Tensor:
    """The first bits of what SplitMix64 gives in these states, in their memory."""
    return shift_right(most_mixed(states), 64 - UNIFORM_BITS)
