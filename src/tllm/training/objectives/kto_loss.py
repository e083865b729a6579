"""`KTOLoss`: the objective of the task "kto", whose replies are each desirable or undesirable (2402.01306)."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.preference_rows import CHOSEN, MISMATCHED, REJECTED, ROLE
from tllm.training.job.preference_tables import KTOConfig
from tllm.training.objectives.objective import MicrobatchLoss
from tllm.training.objectives.reply_log_probs import REFERENCE, ReplyLogProbs, sums

DIVERGENCE = "kl"
"""The number of each document that says how far the model is from the reference, alike in a whole step."""


class KTOLoss:
    """An `Objective`: with r = log p - log p_ref of a reply, 1 - σ(β (r - kl)) if it is wanted, else 1 - σ(β (kl - r)).

    `kl` is the step's (`DivergenceEstimate`); the loss "apo_zero_unpaired" (2408.06266, equation 7) takes 0 for it.
    """

    metric_names: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")

    def __init__(self, config: KTOConfig, log_probs: ReplyLogProbs) -> None:
        self._config, self.log_probs = config, log_probs

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        config, cp = self._config, self.log_probs.cp
        log_probs_N = self.log_probs(model, x_TD, tokens)
        ratio_N = log_probs_N - tokens.of_documents[REFERENCE].to(log_probs_N.dtype)
        known = tokens.of_documents.get(DIVERGENCE)
        kl_N = torch.zeros_like(ratio_N) if known is None else known.to(ratio_N.dtype)
        role_N = tokens.of_documents[ROLE]
        chosen, rejected = role_N == CHOSEN, role_N == REJECTED
        chosen_losses = 1 - torch.sigmoid(config.beta * (ratio_N - kl_N)[chosen])
        rejected_losses = 1 - torch.sigmoid(config.beta * (kl_N - ratio_N)[rejected])
        loss = config.desirable_weight * chosen_losses.sum() + config.undesirable_weight * rejected_losses.sum()
        metrics = sums(
            cp,
            rewards__chosen=config.beta * ratio_N[chosen],
            rewards__rejected=config.beta * ratio_N[rejected],
            logps__chosen=log_probs_N[chosen],
            logps__rejected=log_probs_N[rejected],
            kl=kl_N[chosen | rejected],
        )
        return MicrobatchLoss(loss, loss * (cp.rank == 0), metrics)


class MismatchedRatios:
    """An `Objective` that learns nothing: log p - log p_ref of replies to other prompts, as the metric "kl"."""

    metric_names: tuple[str, ...] = ("kl",)

    def __init__(self, log_probs: ReplyLogProbs) -> None:
        self._log_probs = log_probs

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        log_probs_N = self._log_probs(model, x_TD, tokens)
        is_mismatched = tokens.of_documents[ROLE] == MISMATCHED
        ratio_N = log_probs_N - tokens.of_documents[REFERENCE].to(log_probs_N.dtype)
        return MicrobatchLoss(log_probs_N.sum(), metrics=sums(self._log_probs.cp, kl=ratio_N[is_mismatched].double()))
