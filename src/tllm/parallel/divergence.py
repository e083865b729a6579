"""The divergence of a student's next-token distribution from a teacher's, where the student's vocabulary is cut between
ranks.

The generalised Jensen-Shannon divergence of GKD (2306.13649, equation 1), in nats, with TRL's `beta`:

    0        KL(p || q): forward, the student covers what the teacher says
    1        KL(q || p): reverse, the student keeps to what the teacher says
    between  beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q

p is the teacher's distribution and q the student's. Either is over all tokens, or over the K tokens that the teacher
finds most likely and one bucket more for all others together, whose mass counts too. By the log-sum inequality the
divergence of the buckets is never more than that of all tokens. Of the forward KL it lacks exactly
p(rest) KL(p given rest || q given rest).

As in `cross_entropy`, the memory of the logits becomes the gradient's and there can be one backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.core.errors import ConfigError
from tllm.parallel.cross_entropy import gathered
from tllm.parallel.embedding import ids_held
from tllm.spec.cut import Range

NO_TOKEN = -1
"""The id in a place of the K that has no token, whose log p is -inf: of fewer than K tokens the others are the rest."""

NUMBERS_AT_ONCE = 1 << 20
"""Of a matrix of all logits: so many are in memory a second time."""


def divergence_over_all(logits_TV: Tensor, log_p_TV: Tensor, tp: Group, beta: float) -> Tensor:
    """The divergence of each token, [T], from this rank's columns of the student's logits and of log p.

    The same bits on every rank; backward takes the gradient as every rank has it and gives that of this rank's columns.
    """
    return _OverAll.apply(logits_TV, log_p_TV, tp, beta)  # type: ignore[no-any-return, no-untyped-call]


def divergence_over_top(
    logits_TV: Tensor, ids_TK: Tensor, log_p_TB: Tensor, vocab: Range, tp: Group, beta: float
) -> Tensor:
    """The divergence of each token, [T], from this rank's columns [vocab) of the student's logits.

    `ids_TK` are the teacher's K tokens and `log_p_TB` the logarithms of their probabilities, the last of B = K + 1
    that of all other tokens together. An id may be NO_TOKEN. ConfigError for another id that no rank has.
    """
    return _OverTop.apply(logits_TV, ids_TK, log_p_TB, vocab, tp, beta)  # type: ignore[no-any-return, no-untyped-call]


def terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """What each token or bucket adds to the divergence, and to its derivative by log q; alike in shape.

    A multiple of q is left out of the derivative: no logit changes the sum of q.
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return _times(p, log_p - log_q), -p
    if beta == 1:
        term = _times(q, log_q - log_p)
        return term, term
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    own = (1 - beta) * _times(q, log_q - log_m)
    return beta * _times(p, log_p - log_m) + own, own


class _OverAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, log_p_TV: Tensor, tp: Group, beta: float) -> Tensor:
        mine_T = torch.cat([logits_TV[rows].logsumexp(-1) for rows in _some_rows(logits_TV)])
        total_T1 = gathered(mine_T, tp).logsumexp(0).unsqueeze(-1)
        z_TV, sums = logits_TV.detach(), []
        for rows in _some_rows(z_TV):
            term_TV, slope_TV = terms(log_p_TV[rows].to(z_TV.dtype), z_TV[rows].sub_(total_T1[rows]), beta)
            sums.append(torch.stack((term_TV.sum(-1), slope_TV.sum(-1))))
        divergence_T, slopes_T = gathered(torch.cat(sums, -1), tp).sum(0).unbind()
        for rows in _some_rows(z_TV):
            log_q_TV = z_TV[rows]
            _, slope_TV = terms(log_p_TV[rows].to(z_TV.dtype), log_q_TV, beta)
            log_q_TV.exp_().mul_(-slopes_T[rows].unsqueeze(-1)).add_(slope_TV)
        ctx.save_for_backward(z_TV)
        return divergence_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_TV,) = ctx.saved_tensors
        return gradient_TV.mul_(gradient_T.unsqueeze(-1)), None, None, None


class _OverTop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, ids_TK: Tensor, log_p_TB: Tensor, vocab: Range, tp: Group, beta: float
    ) -> Tensor:
        here_TK, column_TK = ids_held(ids_TK.long(), vocab)
        top_TK = logits_TV.gather(-1, column_TK) * here_TK
        # The logits of all others, by their own maximum: a rest of 1e-40 is as exact as one of a half.
        rest_TV = logits_TV.detach()
        rest_TV.scatter_reduce_(-1, column_TK, torch.where(here_TK, -math.inf, math.inf).to(rest_TV.dtype), "amin")
        largest_T = rest_TV.amax(-1).clamp(min=torch.finfo(rest_TV.dtype).min)
        rest_TV.sub_(largest_T.unsqueeze(-1)).exp_()
        mine_T = largest_T + rest_TV.sum(-1).log()
        # One message for the sum of the rest, the logits of the K tokens, and how many of these the rank has.
        mine = torch.cat((mine_T[:, None], here_TK.sum(-1, keepdim=True).to(rest_TV.dtype), top_TK), -1)
        parts = gathered(mine, tp)
        _check(ids_TK, parts[..., 1].sum(0))
        rest_T = parts[..., 0].logsumexp(0)
        top_TK = parts[..., 2:].sum(0).masked_fill(ids_TK == NO_TOKEN, -math.inf)
        log_q_TB = torch.cat((top_TK, rest_T[:, None]), -1).log_softmax(-1)
        term_TB, slope_TB = terms(log_p_TB.to(log_q_TB.dtype), log_q_TB, beta)
        gradient_TB = slope_TB - log_q_TB.exp() * slope_TB.sum(-1, keepdim=True)
        # rest_TV holds exp(logit - largest); times this it is the gradient: q given rest, times the bucket's gradient.
        share_T = torch.where(rest_T.isinf(), 0.0, (largest_T - rest_T).exp() * gradient_TB[:, -1])
        ctx.save_for_backward(rest_TV, column_TK, gradient_TB[:, :-1] * here_TK, share_T)
        return term_TB.sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        rest_TV, column_TK, gradient_TK, share_T = ctx.saved_tensors
        gradient_TV = rest_TV.mul_((share_T * gradient_T).unsqueeze(-1))
        gradient_TV.scatter_add_(-1, column_TK, gradient_TK * gradient_T.unsqueeze(-1))
        return gradient_TV, None, None, None, None, None


def _times(weight: Tensor, x: Tensor) -> Tensor:
    """weight * x, and 0 where the weight is, whatever x: the limit of p log p."""
    return torch.where(weight > 0, weight * x, 0.0)


def _some_rows(x_TV: Tensor) -> Iterator[slice]:
    """The rows of a matrix of logits, some at a time, so that what is made of them takes little memory."""
    rows, width = x_TV.shape
    step = max(1, NUMBERS_AT_ONCE // max(width, 1))
    yield from (slice(at, min(at + step, rows)) for at in range(0, max(rows, 1), step))


def _check(ids_TK: Tensor, known_T: Tensor) -> None:
    unknown_T = known_T != (ids_TK != NO_TOKEN).sum(-1)
    if unknown_T.any():
        largest = int(ids_TK[unknown_T].max())
        raise ConfigError(
            f"token {largest} of the teacher is outside the student's vocabulary",
            "teacher and student must have the same tokens: take two models of one series",
        )
