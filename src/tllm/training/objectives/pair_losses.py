"""The losses of preference pairs by their log-probabilities: DPO and its variants, ORPO, SimPO. Each depends on its
pair alone.

Names and, where papers leave it open, forms are those of TRL. With r = log p(y | x) - log p_ref(y | x), chosen r_w and
rejected r_l, and d = r_w - r_l.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tllm.training.job.preference_tables import DPOConfig, ORPOConfig, SimPOConfig
from tllm.training.objectives.reply_log_probs import Pairs


@dataclass(frozen=True)
class PairLosses:
    """Of each of P pairs: its loss, what TRL calls the rewards of its replies, and further metrics by name."""

    losses_P: Tensor
    chosen_rewards_P: Tensor
    rejected_rewards_P: Tensor
    chosen_log_probs_P: Tensor
    rejected_log_probs_P: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)


class DPOPairs:
    """Direct preference optimization (2305.18290), and what took its place in later papers (`losses_of`)."""

    more: tuple[str, ...] = ()

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    def __call__(self, pairs: Pairs) -> PairLosses:
        beta = self.config.beta
        chosen_P, rejected_P = pairs.chosen_P - pairs.reference_chosen_P, pairs.rejected_P - pairs.reference_rejected_P
        return PairLosses(
            self.losses_of(chosen_P, rejected_P, pairs),
            beta * chosen_P,
            beta * rejected_P,
            pairs.chosen_P,
            pairs.rejected_P,
        )

    def losses_of(self, chosen_P: Tensor, rejected_P: Tensor, pairs: Pairs) -> Tensor:
        """The loss of each pair by the ratios r_w and r_l."""
        beta, smoothing = self.config.beta, self.config.label_smoothing
        scaled_P = beta * (chosen_P - rejected_P)
        mean_difference_P = chosen_P / pairs.chosen_tokens_P - rejected_P / pairs.rejected_tokens_P
        match self.config.loss_type:
            case "sigmoid":  # with smoothing: conservative DPO (Mitchell, 2023)
                return -(1 - smoothing) * logsigmoid(scaled_P) - smoothing * logsigmoid(-scaled_P)
            case "hinge":  # SLiC, 2305.10425
                return torch.relu(1 - scaled_P)
            case "ipo":  # 2310.12036, equation 17; of means over tokens, as its authors have it
                return (mean_difference_P - 1 / (2 * beta)) ** 2
            case "robust":  # 2403.00409
                clean_P, flipped_P = -(1 - smoothing) * logsigmoid(scaled_P), -smoothing * logsigmoid(-scaled_P)
                return (clean_P - flipped_P) / (1 - 2 * smoothing)
            case "exo_pair":  # 2402.00856, equation 16: KL(p || [1 - ε, ε])
                return torch.sigmoid(scaled_P) * (logsigmoid(scaled_P) - math.log1p(-smoothing)) + torch.sigmoid(
                    -scaled_P
                ) * (logsigmoid(-scaled_P) - math.log(smoothing))
            case "nca_pair":  # 2402.05369
                return (
                    -logsigmoid(beta * chosen_P)
                    - 0.5 * logsigmoid(-beta * chosen_P)
                    - 0.5 * logsigmoid(-beta * rejected_P)
                )
            case "bco_pair":  # 2404.04656, without the running mean of rewards
                return -logsigmoid(beta * chosen_P) - logsigmoid(-beta * rejected_P)
            case "sppo_hard":  # 2405.00675, equation 4.7 with probabilities 1 and 0
                return (chosen_P - 0.5 / beta) ** 2 + (rejected_P + 0.5 / beta) ** 2
            case "apo_zero":  # 2408.06266, equation 7
                return 1 - torch.sigmoid(beta * chosen_P) + torch.sigmoid(beta * rejected_P)
            case "apo_down":  # 2408.06266, equation 8
                return torch.sigmoid(beta * chosen_P) + 1 - torch.sigmoid(scaled_P)
            case "sigmoid_norm":  # length-normalised DPO (Tülu 3, 2411.15124)
                return -logsigmoid(beta * mean_difference_P)
        raise AssertionError(f"the loss {self.config.loss_type} is not known")


class ORPOPairs:
    """Odds-ratio preference optimization (2403.07691): -log p(y_w) for each token - β log σ(log odds_w - log odds_l).

    Odds are p / (1 - p) of the mean log-probability of a reply's tokens.
    """

    more = ("nll_loss", "log_odds_ratio", "log_odds_chosen")

    def __init__(self, config: ORPOConfig) -> None:
        self.config = config

    def __call__(self, pairs: Pairs) -> PairLosses:
        beta, chosen_P, rejected_P = self.config.beta, pairs.chosen_means_P, pairs.rejected_means_P
        log_odds_P = chosen_P - rejected_P - (_log_of_the_rest(chosen_P) - _log_of_the_rest(rejected_P))
        ratio_P = logsigmoid(log_odds_P)
        more = {"nll_loss": -chosen_P, "log_odds_ratio": ratio_P, "log_odds_chosen": log_odds_P}
        return PairLosses(-chosen_P - beta * ratio_P, beta * chosen_P, beta * rejected_P, chosen_P, rejected_P, more)


class SimPOPairs:
    """Simple preference optimization (2405.14734): -log σ(β (mean log p(y_w) - mean log p(y_l)) - γ)."""

    more = ("nll_loss",)

    def __init__(self, config: SimPOConfig) -> None:
        self.config = config

    def __call__(self, pairs: Pairs) -> PairLosses:
        config, chosen_P, rejected_P = self.config, pairs.chosen_means_P, pairs.rejected_means_P
        logits_P = config.beta * (chosen_P - rejected_P) - config.simpo_gamma
        smoothing = config.label_smoothing
        losses_P = -(1 - smoothing) * logsigmoid(logits_P) - smoothing * logsigmoid(-logits_P)
        return PairLosses(
            losses_P - config.cpo_alpha * chosen_P,
            config.beta * chosen_P,
            config.beta * rejected_P,
            chosen_P,
            rejected_P,
            {"nll_loss": -chosen_P},
        )


def _log_of_the_rest(log_p_P: Tensor) -> Tensor:
    """log(1 - p) by log p; of a p that is rounded to 1, of the largest below it: log 0 has no gradient."""
    return (-torch.expm1(log_p_P.clamp(max=-torch.finfo(log_p_P.dtype).eps))).log()
