"""`PreferenceLoss`: the objective of the tasks that prefer one of two replies, "dpo", "orpo" and "simpo"."""

from __future__ import annotations

from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.training.data.batch_tensors import Tokens
from tllm.training.objectives.objective import MicrobatchLoss
from tllm.training.objectives.pair_losses import DPOPairs, ORPOPairs, SimPOPairs
from tllm.training.objectives.reply_log_probs import ReplyLogProbs, pairs_of, sums

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


class PreferenceLoss:
    """An `Objective`: the sum of the losses of a microbatch's pairs; metrics are means over pairs."""

    def __init__(self, log_probs: ReplyLogProbs, pair_loss: DPOPairs | ORPOPairs | SimPOPairs) -> None:
        self.log_probs, self._pair_loss = log_probs, pair_loss
        self.metric_names: tuple[str, ...] = (*METRICS, *pair_loss.more)

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        cp = self.log_probs.cp
        found = self._pair_loss(pairs_of(self.log_probs(model, x_TD, tokens), tokens))
        loss = found.losses_P.sum()
        margins_P = found.chosen_rewards_P - found.rejected_rewards_P
        metrics = sums(
            cp,
            rewards__chosen=found.chosen_rewards_P,
            rewards__rejected=found.rejected_rewards_P,
            rewards__accuracies=(margins_P > 0).double(),
            rewards__margins=margins_P,
            logps__chosen=found.chosen_log_probs_P,
            logps__rejected=found.rejected_log_probs_P,
            **found.more,
        )
        return MicrobatchLoss(loss, loss * (cp.rank == 0), metrics)
