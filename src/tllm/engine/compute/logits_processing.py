"""Changes the logits of all rows of a batch as their requests ask, before tokens are drawn: penalties, bias, bans, and
what a grammar allows. Temperature, min-p, top-k and top-p become the `Draws` that `gumbel_max` takes.

Rows are over the whole vocabulary, [R, V], and one that asks for nothing stays as it is. What the host knows of all
rows becomes a few tensors, which are moved to the device of the logits once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

import torch
from torch import Tensor

from tllm.engine.compute.logprobs import take_rows
from tllm.engine.schedule.batch import Sampling
from tllm.engine.schedule.grammar_state import unpack_mask
from tllm.kernels.gumbel_max import Draws

TEMPERATURES = torch.finfo(torch.float32)
"""Scores may be float32: a temperature below its least normal number, or above its largest, counts as that one."""


def processed(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits after penalties, bias, bans and masks; the same tensor where no row has any.

    FrameError for a mask that is not one of this vocabulary.
    """
    if not any(one.history or one.logit_bias or one.banned or one.mask for one in samplings):
        return logits_RV
    scores_RV = logits_RV.clone()
    penalise(scores_RV, samplings)
    _add_bias(scores_RV, samplings)
    _ban(scores_RV, samplings)
    apply_masks(scores_RV, [one.mask for one in samplings])
    return scores_RV


def penalise(scores_RV: Tensor, samplings: Sequence[Sampling]) -> None:
    """Repetition over prompt and output (1909.05858); frequency and presence over the output, as OpenAI has them."""
    penalised = [(row, one) for row, one in enumerate(samplings) if one.history]
    if not penalised:
        return
    seen = [(row, set(one.history)) for row, one in penalised if one.repetition_penalty != 1.0]
    written = [(row, Counter(one.history[one.prompt_length :])) for row, one in penalised]
    lists = (*_places(seen), *_places(written), [n for _, counts in written for n in counts.values()])
    seen_rows, seen_ids, rows_N, ids_N, counts_N = _moved(lists, scores_RV.device)
    factors = [[one.repetition_penalty, one.frequency_penalty, one.presence_penalty] for one in samplings]
    repetition_R, frequency_R, presence_R = _numbers(factors, scores_RV).unbind(1)
    if len(seen_ids):
        scores, factor = scores_RV[seen_rows, seen_ids], repetition_R[seen_rows]
        scores_RV[seen_rows, seen_ids] = torch.where(scores > 0, scores / factor, scores * factor)
    scores_RV[rows_N, ids_N] -= frequency_R[rows_N] * counts_N.to(scores_RV.dtype) + presence_R[rows_N]


def _add_bias(scores_RV: Tensor, samplings: Sequence[Sampling]) -> None:
    biased = [(row, one.logit_bias) for row, one in enumerate(samplings) if one.logit_bias]
    if biased:
        rows_N, ids_N = _moved(_places(biased), scores_RV.device)
        scores_RV[rows_N, ids_N] += _numbers([value for _, bias in biased for value in bias.values()], scores_RV)


def _ban(scores_RV: Tensor, samplings: Sequence[Sampling]) -> None:
    banned = [(row, one.banned) for row, one in enumerate(samplings) if one.banned]
    if banned:
        rows_N, ids_N = _moved(_places(banned), scores_RV.device)
        scores_RV[rows_N, ids_N] = -math.inf


def apply_masks(scores_RV: Tensor, masks: Sequence[bytes]) -> None:
    """Minus infinity for each token that the packed mask of its row does not allow; a row without a mask has b""."""
    held, vocab_size, device = [row for row, mask in enumerate(masks) if mask], scores_RV.shape[1], scores_RV.device
    if not held:
        return
    bits = bytearray(b"".join(unpack_mask(masks[row], vocab_size) for row in held))
    bytes_MN = torch.frombuffer(bits, dtype=torch.uint8).view(len(held), -1).to(device)
    allowed_MV = (bytes_MN[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten(1)
    rows_M = torch.tensor(held).to(device)
    scores_RV[rows_M] = scores_RV[rows_M].masked_fill_(allowed_MV[:, :vocab_size] == 0, -math.inf)


def draws_of(logits_RV: Tensor, wanted: Sequence[tuple[Sampling, int]]) -> Draws:
    """How a token of each row is drawn, for its `Sampling`, of a temperature above 0, and its position."""
    samplings = [one for one, _ in wanted]
    least = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in samplings]
    temperatures = [min(max(one.temperature, TEMPERATURES.tiny), TEMPERATURES.max) for one in samplings]
    numbers = [temperatures, least, [one.top_p for one in samplings]]
    temperatures_R1, least_R1, top_p_R1 = torch.tensor(numbers, dtype=torch.float64).to(logits_RV.device)[..., None]
    seeds = [(one.seed + 2**63) % 2**64 - 2**63 for one in samplings]  # the same 64 bits with a sign
    seeds_R1, positions_R1 = torch.tensor([seeds, [at for _, at in wanted]]).to(logits_RV.device)[..., None]
    of_top_k = _least_of_top_k(logits_RV, temperatures_R1, samplings)
    if of_top_k is not None:
        least_R1 = torch.maximum(least_R1, of_top_k)
    is_narrowed = of_top_k is not None or any(one.min_p > 0 for one in samplings)
    has_top_p = any(one.top_p < 1 for one in samplings)
    return Draws(
        temperatures_R1,
        seeds_R1,
        positions_R1,
        least_R1 if is_narrowed else None,
        top_p_R1 if has_top_p else None,
    )


def _least_of_top_k(logits_RV: Tensor, temperatures_R1: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
    """The score of the last token that top-k leaves in each row, [R, 1]; None where no row asks for it."""
    asking = [row for row, one in enumerate(samplings) if 0 < one.top_k < logits_RV.shape[1]]
    if not asking:
        return None
    top_k = [samplings[row].top_k for row in asking]
    rows_N, places_N = _moved((asking, [k - 1 for k in top_k]), logits_RV.device)
    likeliest_NK = take_rows(logits_RV, asking).topk(max(top_k)).values
    last_N1 = likeliest_NK.gather(1, places_N[:, None]) - likeliest_NK[:, :1]
    scores_N1 = last_N1 / temperatures_R1[rows_N].to(logits_RV.dtype)
    return torch.full_like(temperatures_R1, -math.inf).index_copy_(0, rows_N, scores_N1.double())


def _places(of_rows: Sequence[tuple[int, Collection[int]]]) -> tuple[list[int], list[int]]:
    """The row and the id of each token that is named, row after row."""
    rows = [row for row, ids in of_rows for _ in range(len(ids))]
    return rows, list(chain.from_iterable(ids for _, ids in of_rows))


def _moved(lists: Sequence[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Each list as a tensor on the device, all in one transfer."""
    whole = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int64).to(device)
    return torch.split(whole, [len(one) for one in lists])


def _numbers(values: Sequence[float] | Sequence[Sequence[float]], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype).to(like.device)
