"""KTO's estimate of how far the model is from the reference, over the global batch of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.preference_rows import MISMATCHED, ROLE
from tllm.training.objectives.kto_loss import DIVERGENCE, MismatchedRatios
from tllm.training.objectives.reply_log_probs import ReplyLogProbs
from tllm.training.step.rank_groups import Groups
from tllm.training.step.rank_model import RankModel

BeforePasses = Callable[[Sequence[Tokens]], list[Tokens]]
"""What is done before the passes over a replica's microbatches of a step. Every rank calls it."""


def unchanged(microbatches: Sequence[Tokens]) -> list[Tokens]:
    """A `BeforePasses` that does nothing."""
    return list(microbatches)


class DivergenceEstimate:
    """A `BeforePasses`: kl = max(0, mean of log p - log p_ref) of prompts with other rows' replies (2402.01306, 4.1).

    The mean is over all rows of the global batch, by a forward pass of the present weights without gradients. What
    remains for training are the rows' own replies, which know the estimate by their number `kl`.
    """

    def __init__(self, model: RankModel, groups: Groups, log_probs: ReplyLogProbs) -> None:
        self._model, self._groups = model, groups
        self._ratios = MismatchedRatios(log_probs)

    def __call__(self, microbatches: Sequence[Tokens]) -> list[Tokens]:
        result = self._model.forward_only([_mismatched(tokens) for tokens in microbatches], self._ratios)
        found = result.metrics.get(DIVERGENCE) if self._groups.tp.rank == 0 else None
        mine = (0.0, 0.0) if found is None else (found.total, found.count)
        total, count = self._groups.world.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        kl = max(0.0, total / count) if count else 0.0
        return [_told(tokens.only(tokens.of_documents[ROLE] != MISMATCHED), kl) for tokens in microbatches]


def _mismatched(tokens: Tokens) -> Tokens:
    """The prompts with other rows' replies; of filling, which has none, all."""
    is_mismatched = tokens.of_documents[ROLE] == MISMATCHED
    return tokens.only(is_mismatched) if bool(is_mismatched.any()) else tokens


def _told(tokens: Tokens, kl: float) -> Tokens:
    kl_N = torch.full((len(tokens.lengths),), kl, dtype=torch.float64, device=tokens.ids_T.device)
    return replace(tokens, of_documents={**tokens.of_documents, DIVERGENCE: kl_N})
