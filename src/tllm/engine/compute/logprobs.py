"""The likeliest tokens and log-probabilities of many rows of logits at once, and what comes of rows brought to the host
together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tllm.spec.request import TokenLogprobs

LEAST_TEMPERATURE = 1e-30
"""A lower one counts as this for log-probabilities: so logits of up to 1e8 divided by it are finite in float32, and but
for equal ones the largest has all of the probability already."""


def token_logprobs(
    logits_RV: Tensor, ids_R: Tensor, tops: Sequence[int | None], temperatures: Sequence[float] = ()
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The tokens, and where a row has a number in `tops` its token's log-probability with those of so many likeliest.

    They are of the model itself, or of the model at the row's temperature, and mean nothing for a token that is none.
    """
    parts, by_top, vocab_size = [ids_R], dict[int, list[int]](), logits_RV.shape[1]
    for row, top in enumerate(tops):
        if top is not None:
            by_top.setdefault(top, []).append(row)
    for top, rows in by_top.items():
        scores_NV, ids_N1 = take_rows(logits_RV, rows), take_rows(ids_R, rows)[:, None]
        if any(temperatures[row] != 1.0 for row in rows[: len(temperatures)]):
            divisors = [[max(temperatures[row], LEAST_TEMPERATURE)] for row in rows]
            scores_NV = scores_NV / torch.tensor(divisors, dtype=scores_NV.dtype).to(scores_NV.device)
        logprobs_NV = torch.log_softmax(scores_NV, -1)
        own_N1 = logprobs_NV.gather(1, ids_N1.clamp(max=vocab_size - 1))
        ranks_N1 = 1 + (logprobs_NV > own_N1).sum(1, keepdim=True)
        parts += (own_N1, ranks_N1, *logprobs_NV.topk(min(top, vocab_size)))
    token_ids, *numbers = (part.tolist() for part in on_host(parts))
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
    for place, rows in enumerate(by_top.values()):
        for row, (own,), (rank,), values, ids in zip(rows, *numbers[4 * place : 4 * place + 4], strict=True):
            likeliest = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            logprobs[row] = TokenLogprobs(token_ids[row], own, tuple(likeliest), rank)
    return token_ids, logprobs


def most_likely(logits_RV: Tensor) -> Tensor:
    """The token with the largest logit of each row, [R]: the first of those that are equal; V where it is no number."""
    columns_R, values_R = largest(logits_RV)
    return columns_R.masked_fill_(~values_R.isfinite(), logits_RV.shape[1])


def largest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Where the largest logit of each row is, the first of those that are equal, and the logit; a NaN is larger than
    all."""
    if logits_RV.is_cpu:
        columns_R = torch.from_numpy(logits_RV.numpy().argmax(-1))  # a tenth of the time of torch's own
    else:
        columns_R = logits_RV.argmax(-1)
    return columns_R, logits_RV.gather(1, columns_R[:, None])[:, 0]


def on_host(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors of one device on the host, brought there in one transfer: as doubles, which hold every id exactly."""
    if all(part.is_cpu for part in parts):
        return parts
    whole = torch.cat([part.flatten().double() for part in parts]).cpu()
    pieces = torch.split(whole, [part.numel() for part in parts])
    return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]


def take_rows(x: Tensor, rows: list[int]) -> Tensor:
    """Rows of x in their order; x itself where that is all of them."""
    return x if len(rows) == len(x) else x[torch.tensor(rows).to(x.device)]
