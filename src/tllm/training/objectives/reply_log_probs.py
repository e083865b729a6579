"""Log-probabilities of whole replies, and which of a microbatch's documents are a pair."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import Mesh
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.preference_rows import CHOSEN, REJECTED, ROLE
from tllm.training.objectives.log_probs import TokenLosses, document_sums
from tllm.training.objectives.objective import MetricSum

REFERENCE = "reference_log_probs"
"""The number of each document that says what the initial weights make of its reply."""


class ReplyLogProbs:
    """(model, hidden_TD, tokens) -> log p(reply | prompt) of each document of the microbatch, [documents].

    Every rank of cp gets them all. `tail_weight` multiplies what lies beyond the length of a pair's shorter reply
    (LD-DPO, 2409.06411).
    """

    def __init__(self, mesh: Mesh, cp: Group, tail_weight: float = 1.0) -> None:
        self.cp, self._tail_weight = cp, tail_weight
        self._losses = TokenLosses(mesh, precise=True)

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        log_probs_T = self._losses.log_probs(model, x_TD, tokens)
        if self._tail_weight != 1.0:
            is_tail_T = tokens.positions_T >= tokens.of_documents["tail"][tokens.document_T]
            log_probs_T = torch.where(is_tail_T, log_probs_T * self._tail_weight, log_probs_T)
        return document_sums(log_probs_T, tokens, self.cp)


class Pairs(NamedTuple):
    """Of each of P pairs: log-probabilities of both replies, their tokens, and what the reference makes of them."""

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor
    reference_chosen_P: Tensor
    reference_rejected_P: Tensor

    @property
    def chosen_means_P(self) -> Tensor:
        """log p of the chosen reply for each of its tokens."""
        return self.chosen_P / self.chosen_tokens_P

    @property
    def rejected_means_P(self) -> Tensor:
        return self.rejected_P / self.rejected_tokens_P


def pairs_of(log_probs_N: Tensor, tokens: Tokens) -> Pairs:
    """The pairs of a microbatch, whose two replies follow one another. The reference is 0 where there is none."""
    chosen_P, rejected_P = pair_places(tokens)
    lengths_N = tokens.of_documents["reply_tokens"]
    reference_N = tokens.of_documents.get(REFERENCE)
    reference_N = torch.zeros_like(log_probs_N) if reference_N is None else reference_N.to(log_probs_N.dtype)
    return Pairs(
        *(of_each_N[places] for of_each_N in (log_probs_N, lengths_N, reference_N) for places in (chosen_P, rejected_P))
    )


def pair_places(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The numbers of the chosen and of the rejected documents of a microbatch, pair by pair."""
    role_N = tokens.of_documents[ROLE]
    chosen_P, rejected_P = (role_N == CHOSEN).nonzero()[:, 0], (role_N == REJECTED).nonzero()[:, 0]
    assert len(chosen_P) == len(rejected_P), "a pair stays together"
    return chosen_P, rejected_P


def sums(cp: Group, **metrics: Tensor) -> dict[str, MetricSum]:
    """The sums of metrics over what each is a mean of; told by one of the ranks of cp, which all have the same.

    `__` in a name stands for TRL's `/`.
    """
    told = cp.rank == 0
    return {
        name.replace("__", "/"): MetricSum(float(x.detach().sum()), float(x.numel())) if told else MetricSum(0.0, 0.0)
        for name, x in metrics.items()
    }
