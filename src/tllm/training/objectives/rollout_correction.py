"""Importance sampling between the weights that sampled completions and those that learn from them.

The ratio of token t is p(t) by the weights that the step begins with, over p(t) by those that sampled it: others where
steps are sampled ahead (`max_staleness`), and the same but for rounding elsewhere. What is learned of a token is
multiplied by it, within bounds (truncated importance sampling): the clipped objective then compares with the weights
that the step begins with, and the correction is for what lies before (decoupled PPO, 2110.00641; AReaL, 2505.24298).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.training.data.batch_tensors import Tokens
from tllm.training.job.rollout_keys import GRPOConfig
from tllm.training.objectives.log_probs import document_sums
from tllm.training.objectives.objective import MetricSum

DIFFERENCE, RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
MISMATCH_METRICS = (f"{DIFFERENCE}/mean", f"{DIFFERENCE}/max", f"{RATIO}/min", f"{RATIO}/mean", f"{RATIO}/max")
"""How far the log-probabilities are apart, and the ratios that come of it, before they are bounded."""
CLIPPED = f"{RATIO}/clipped_ratio"
"""The part of the ratios that is out of bounds."""

LARGEST_LOG = 20.0
"""Of a ratio: beyond it a number says nothing but that it is too large, and could be infinite."""


class RolloutCorrection:
    """(both sides' log-probabilities of each token, which are learned) -> the weight of each, and metrics.

    The ratio of a sequence is the product of those of its learned tokens, and the weight of each of them.
    """

    def __init__(self, config: GRPOConfig, cp: Group) -> None:
        level, what = config.rollout_importance_sampling_mode.split("_")
        self._of_sequences, self._masks, self._cp = level == "sequence", what == "mask", cp
        self._low, self._high = config.rollout_importance_sampling_clip_min, config.rollout_importance_sampling_clip_max

    def __call__(
        self, old_T: Tensor, sampled_T: Tensor, learned: Tensor, tokens: Tokens
    ) -> tuple[Tensor, dict[str, MetricSum]]:
        log_T = (old_T - sampled_T) * learned
        metrics = mismatch(log_T[learned])
        if self._of_sequences:
            ratio_N = _ratios(document_sums(log_T, tokens, self._cp))
            counts_N = document_sums(learned.to(log_T.dtype), tokens, self._cp)
            weight_T, ratio_R = self._bounded(ratio_N)[tokens.document_T], ratio_N[counts_N > 0]
            metrics |= _spread(ratio_R)
        else:
            ratio_T = _ratios(log_T)
            weight_T, ratio_R = self._bounded(ratio_T), ratio_T[learned]
        outside = (ratio_R < self._low) | (ratio_R > self._high)
        return weight_T, metrics | {CLIPPED: MetricSum(float(outside.sum()), float(len(ratio_R)))}

    def _bounded(self, ratio: Tensor) -> Tensor:
        if not self._masks:
            return ratio.clamp(self._low, self._high)
        return torch.where((ratio < self._low) | (ratio > self._high), 0.0, ratio)


def mismatch(log_L: Tensor) -> dict[str, MetricSum]:
    """`MISMATCH_METRICS` of the tokens that are learned, from the logarithms of their ratios."""
    if not len(log_L):
        return dict.fromkeys(MISMATCH_METRICS, MetricSum(0.0, 0.0))
    off_L = log_L.abs()
    differences = MetricSum(float(off_L.sum()), float(len(off_L))), MetricSum(float(off_L.max()), 1.0)
    return dict(zip(MISMATCH_METRICS[:2], differences, strict=True)) | _spread(_ratios(log_L))


def _spread(ratio_R: Tensor) -> dict[str, MetricSum]:
    """The least, the mean and the largest ratio."""
    if not len(ratio_R):
        return dict.fromkeys(MISMATCH_METRICS[2:], MetricSum(0.0, 0.0))
    sums = (
        MetricSum(float(ratio_R.min()), 1.0),
        MetricSum(float(ratio_R.sum()), float(len(ratio_R))),
        MetricSum(float(ratio_R.max()), 1.0),
    )
    return dict(zip(MISMATCH_METRICS[2:], sums, strict=True))


def _ratios(log: Tensor) -> Tensor:
    return log.clamp(max=LARGEST_LOG).exp()
