"""`PolicyGradientLoss`: what is learned from rewarded completions: GRPO, Dr. GRPO, DAPO, GSPO and RLOO.

Of token t of completion i, with advantage A_i and the ratio r of its probability now to that when it was sampled,

    loss = -min(r A_i, clip(r, 1 - epsilon, 1 + epsilon_high) A_i) + beta KL

GRPO (2402.03300) has r of each token; GSPO (2507.18071) one of each completion, the geometric mean of its tokens'.
Where completions are of other weights than a step begins with, the first term is weighed (`rollout_correction`).
How tokens are added up is what GRPO, DAPO (2503.14476) and Dr. GRPO (2503.20783) differ in: here they are summed, and
the step's denominator, which each row brings its part of, divides the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.kernels.batch_invariant import with_value
from tllm.model.transformer import Transformer
from tllm.parallel.cross_entropy import ROWS_AT_ONCE
from tllm.parallel.mesh import Mesh
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.job.job import Job
from tllm.training.objectives.log_probs import TokenLosses, document_sums
from tllm.training.objectives.objective import MetricSum, MicrobatchLoss
from tllm.training.objectives.rollout_correction import CLIPPED, MISMATCH_METRICS, RolloutCorrection, mismatch

ADVANTAGE = "advantage"
"""Of a document: how much better its reward is than what it is compared with."""

SAMPLED, OLD, KEPT, REFERENCE = "sampled_log_probs", "old_log_probs", "kept_log_probs", "reference_log_probs"
"""Of a token: its log-probability as the engine told it, as the first pass found it, where this pass is to write what
it finds, and as the reference has it."""

CLIP_METRICS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


class SampledTokenLosses(TokenLosses):
    """`TokenLosses` of the distribution that tokens are sampled from: at its temperature, and in float32 at least."""

    fuses = False

    def __init__(self, mesh: Mesh, temperature: float) -> None:
        super().__init__(mesh, precise=True)
        self.temperature = temperature

    def logits(self, model: Transformer, x_TD: Tensor, tokens: int) -> Tensor:
        logits_TV = super().logits(model, x_TD, tokens)
        return logits_TV if self.temperature == 1 else logits_TV / self.temperature


class InvariantTokenLosses(SampledTokenLosses):
    """The same of a batch-invariant model, whose log-probabilities are worked out as the engine does, to the bit."""

    def log_probs(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        with torch.no_grad():
            value_T = self._as_engine(model, x_TD, tokens)
        return with_value(super().log_probs(model, x_TD, tokens), value_T) if torch.is_grad_enabled() else value_T

    def _as_engine(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> Tensor:
        predicted_T = tokens.labels_T != IGNORED
        found_T = x_TD.new_zeros(len(predicted_T), dtype=torch.float32)
        parts = (torch.split(x[predicted_T], ROWS_AT_ONCE) for x in (x_TD, tokens.labels_T))
        rows = zip(*parts, strict=True)
        values = [
            torch.log_softmax(self.logits(model, x_RD, len(x_RD)), -1).gather(-1, labels_R[:, None])[:, 0]
            for x_RD, labels_R in rows
        ]
        return found_T.masked_scatter(predicted_T, torch.cat(values))


def sampled_token_losses(mesh: Mesh, temperature: float, batch_invariant: bool) -> SampledTokenLosses:
    """Those of a model that is batch-invariant or not."""
    return (InvariantTokenLosses if batch_invariant else SampledTokenLosses)(mesh, temperature)


class KeepLogProbs:
    """An `Objective` without a loss: writes each token's log-probability to the microbatch's `KEPT`."""

    metric_names: tuple[str, ...] = ()

    def __init__(self, mesh: Mesh, temperature: float, batch_invariant: bool) -> None:
        self.losses = sampled_token_losses(mesh, temperature, batch_invariant)

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        log_probs_T = self.losses.log_probs(model, x_TD, tokens)
        tokens.of_tokens[KEPT].copy_(log_probs_T)
        return MicrobatchLoss(log_probs_T.sum() * 0.0)


class PolicyGradientLoss:
    """An `Objective` of documents with an `ADVANTAGE` each, whose completions' tokens have labels.

    Where there are no `OLD` log-probabilities the pass is the first with these completions: every ratio is 1, exactly.
    """

    def __init__(self, job: Job, mesh: Mesh, cp: Group, batch_invariant: bool = False) -> None:
        assert job.grpo is not None, "checked when the run began"
        self.config, self.cp = job.grpo, cp
        self.losses = sampled_token_losses(mesh, job.grpo.temperature, batch_invariant)
        self.metric_names: tuple[str, ...] = (
            "entropy",
            *CLIP_METRICS,
            *(("kl",) if job.grpo.beta else ()),
            *MISMATCH_METRICS,
            *((CLIPPED,) if job.grpo.is_corrected else ()),
        )
        self.correction = RolloutCorrection(job.grpo, cp) if job.grpo.is_corrected else None

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss:
        log_probs_T = self.losses.log_probs(model, x_TD, tokens)
        now_T = log_probs_T.detach()
        if KEPT in tokens.of_tokens:
            tokens.of_tokens[KEPT].copy_(now_T)
        learned = tokens.labels_T != IGNORED
        learned_T = learned.to(now_T.dtype)
        lengths_N = document_sums(learned_T, tokens, self.cp).clamp(min=1)
        advantage_T = tokens.of_documents[ADVANTAGE].to(now_T.dtype)[tokens.document_T]
        old_T = tokens.of_tokens.get(OLD, now_T)
        ratio_T = self._ratios((log_probs_T - old_T) * learned_T, lengths_N, tokens)
        low, high = self.config.clip_range
        loss_T = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
        sampled_T = tokens.of_tokens[SAMPLED].to(now_T.dtype)
        if self.correction is None:
            far = mismatch((old_T - sampled_T)[learned])
        else:
            weight_T, far = self.correction(old_T, sampled_T, learned, tokens)
            loss_T = loss_T * weight_T
        kl_T = None
        if self.config.beta:
            kl_T = kl_estimate(log_probs_T, tokens.of_tokens[REFERENCE].to(now_T.dtype), self.config.kl_estimator)
            loss_T = loss_T + self.config.beta * kl_T
        loss_T = loss_T * learned_T
        if self.config.loss_type == "grpo":
            loss_T = loss_T / lengths_N[tokens.document_T]
        is_low_T = (ratio_T < low) & (advantage_T < 0)
        is_high_T = (ratio_T > high) & (advantage_T > 0)
        told = dict(zip(CLIP_METRICS, (is_low_T, is_high_T, is_low_T | is_high_T), strict=True))
        told["entropy"] = -now_T  # of a token that was sampled, -log p is an estimate of the entropy without bias
        if kl_T is not None:
            told["kl"] = kl_T.detach()
        count = float(learned_T.sum())
        sums = {name: MetricSum(float((x_T * learned_T).sum()), count) for name, x_T in told.items()}
        return MicrobatchLoss(loss_T.sum(), metrics=sums | far)

    def _ratios(self, log_ratio_T: Tensor, lengths_N: Tensor, tokens: Tokens) -> Tensor:
        """Of each token, or of each sequence at all of its tokens."""
        if self.config.importance_sampling_level == "token":
            return log_ratio_T.exp()
        return (document_sums(log_ratio_T, tokens, self.cp) / lengths_N).exp()[tokens.document_T]


def kl_estimate(log_probs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """Of each token an estimate of KL(policy || reference), http://joschu.net/blog/kl-approx.html."""
    r_T = reference_T - log_probs_T
    if estimator == "k1":
        return -r_T
    return r_T**2 / 2 if estimator == "k2" else r_T.exp() - r_T - 1
