"""`RewardLoss`: the objective of the task "reward", a model with one label that scores whole conversations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tllm.comm.collectives.group import Group
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import Mesh
from tllm.training.data.batch_tensors import Tokens
from tllm.training.job.preference_tables import RewardConfig
from tllm.training.objectives.log_probs import document_sums, sum_over_ranks
from tllm.training.objectives.objective import MicrobatchLoss
from tllm.training.objectives.reply_log_probs import pair_places, sums


class RewardLoss:
    """An `Objective`: -log σ(s_w - s_l - margin) of each pair (Bradley-Terry), s being the score of its last token.

    With `center_rewards_coefficient` c also c (s_w + s_l)² (2312.09244). Metrics are means over pairs.
    """

    metric_names: tuple[str, ...] = ("accuracy", "margin", "mean_reward")

    def __init__(self, config: RewardConfig, mesh: Mesh, cp: Group) -> None:
        self._config, self._tp, self._cp = config, mesh.tp, cp

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        scores_N = self.scores(model, x_TD, tokens)
        chosen, rejected = pair_places(tokens)
        chosen_P, rejected_P = scores_N[chosen], scores_N[rejected]
        margin_P = tokens.of_documents["margin"][chosen].to(chosen_P.dtype)
        losses_P = -logsigmoid(chosen_P - rejected_P - margin_P)
        if self._config.center_rewards_coefficient:
            losses_P = losses_P + self._config.center_rewards_coefficient * (chosen_P + rejected_P) ** 2
        metrics = sums(
            self._cp,
            accuracy=(chosen_P > rejected_P).double(),
            margin=chosen_P - rejected_P,
            mean_reward=torch.cat([chosen_P, rejected_P]),
        )
        loss = losses_P.sum()
        return MicrobatchLoss(loss, loss * (self._cp.rank == 0), metrics)

    def scores(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        """The score of each document of the microbatch, [documents], on every rank; in float32 at least."""
        scores_T = model.scores(x_TD, len(tokens.positions_T))[:, 0]
        scores_T = scores_T.float() if scores_T.dtype == torch.bfloat16 else scores_T
        is_last_T = tokens.positions_T + 1 == tokens.lengths_T
        # The ranks of tp all have the head: one speaks for them, so that its gradient counts once.
        spoken_T = torch.where(is_last_T & (self._tp.rank == 0), scores_T, 0)
        return document_sums(sum_over_ranks(spoken_T, self._tp), tokens, self._cp)
