"""Cross-entropy over a vocabulary that is cut between ranks: the whole logits are never brought together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.core.errors import ConfigError
from tllm.parallel.embedding import ids_held
from tllm.spec.cut import Range

IGNORED = -100
"""The label of a token that is not learned: its loss and gradient are zero."""

ROWS_AT_ONCE = 64
"""Rows of logits whose exponentials are in memory together where they are only measured."""


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, vocab: Range, tp: Group) -> Tensor:
    """loss_T in the logits' dtype, the same bits on every rank, from this rank's columns [vocab) of the logits.

    Backward takes the gradient of loss_T as every rank has it and gives that of this rank's columns, whole. Logits are
    the largest of what training holds, so there is one copy of them: their memory becomes the exponentials', and in
    the backward pass, of which there can be one, the gradient's.
    """
    return _CrossEntropy.apply(logits_TV, labels_T, vocab, tp)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def measured_cross_entropy(logits_TV: Tensor, labels_T: Tensor, vocab: Range, tp: Group) -> Tensor:
    """The same loss_T where nothing is learned from it: the logits stay as they are, and are not copied whole."""
    here_T, column_T = ids_held(labels_T, vocab)
    asked_T = logits_TV.gather(-1, column_T.unsqueeze(-1)).squeeze(-1) * here_T
    some = logits_TV.split(ROWS_AT_ONCE)  # type: ignore[no-untyped-call]
    total_T = torch.cat([rows_TV.logsumexp(-1) for rows_TV in some])
    mine = torch.stack((total_T, asked_T, here_T.to(logits_TV.dtype)))
    total_PT, asked_PT, here_PT = gathered(mine, tp).unbind(1)
    _check(labels_T, here_PT.sum(0) == 1)
    return torch.where(labels_T == IGNORED, 0.0, total_PT.logsumexp(0) - asked_PT.sum(0))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, vocab: Range, tp: Group) -> Tensor:
        here_T, column_T = ids_held(labels_T, vocab)
        column_T1 = column_T.unsqueeze(-1)
        largest_T = logits_TV.amax(-1)
        asked_T = logits_TV.gather(-1, column_T1).squeeze(-1) * here_T
        shrunk_TV = logits_TV.detach().sub_(largest_T.unsqueeze(-1)).exp_()
        mine = torch.stack((largest_T, shrunk_TV.sum(-1), asked_T, here_T.to(logits_TV.dtype)))
        # One message for the maximum, the sum, and the logit asked for with the rank that has it.
        largest_PT, sum_PT, asked_PT, here_PT = gathered(mine, tp).unbind(1)
        _check(labels_T, here_PT.sum(0) == 1)
        top_T = largest_PT.amax(0)
        total_T = (sum_PT * (largest_PT - top_T).exp()).sum(0)
        # shrunk_TV holds exp(logits - largest); times `share_T` it is this rank's part of the softmax.
        ctx.share_T = (largest_T - top_T).exp() / total_T
        ctx.save_for_backward(shrunk_TV, labels_T, here_T, column_T1)
        return torch.where(labels_T == IGNORED, 0.0, top_T - asked_PT.sum(0) + total_T.log())

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None, None]:
        shrunk_TV, labels_T, here_T, column_T1 = ctx.saved_tensors
        gradient_T = torch.where(labels_T == IGNORED, 0.0, gradient_T)
        gradient_TV = shrunk_TV.mul_((ctx.share_T * gradient_T).unsqueeze(-1))
        gradient_TV.scatter_add_(-1, column_T1, -(gradient_T * here_T).unsqueeze(-1))
        return gradient_TV, None, None, None


def gathered(mine: Tensor, tp: Group) -> Tensor:
    """Every rank's numbers, [ranks, ...]; those of a rank alone stay where they are."""
    if tp.size == 1:
        return mine.unsqueeze(0)
    return torch.stack(tp.all_gather(mine, [tuple(mine.shape)] * tp.size))


def check_labels(labels_T: Tensor, size: int) -> None:
    """ConfigError for a label of the host's that a vocabulary of so many has not."""
    _check(labels_T, (labels_T >= 0) & (labels_T < size))


def _check(labels_T: Tensor, known_T: Tensor) -> None:
    """A label that no rank has would otherwise be learned as nothing at all.

    Of those on a GPU `check_labels` was asked at the host: to ask here would be to wait for all that the GPU does.
    """
    if labels_T.is_cuda:
        return
    unknown_T = ~known_T & (labels_T != IGNORED)
    if unknown_T.any():
        raise ConfigError(
            f"label {int(labels_T[unknown_T][0])} is outside the model's vocabulary",
            f"give the tokenizer that the model was made with; {IGNORED} marks a token that is not learned",
        )
