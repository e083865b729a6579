"""The loss of rewarded completions, and its gradient, equal to slow loops over the papers' formulas."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.training.post_training.policy_task import grpo, policy_job
from tllm.comm.collectives.group import solo
from tllm.parallel.mesh import Mesh
from tllm.spec.cut import Cut
from tllm.training.data.batch_tensors import Tokens, tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.job.rollout_keys import CORRECTION_MODES, GRPOConfig
from tllm.training.objectives.policy_gradient import KEPT, OLD, REFERENCE, SAMPLED, PolicyGradientLoss, kl_estimate
from tllm.training.objectives.rollout_correction import MISMATCH_METRICS, RATIO, mismatch
from tllm.training.policy.rewarded_rows import completion_row
from tllm.training.policy.rollouts import Completion

VOCAB = 11
FOLDER = Path("/nowhere")


def corrected(mode: str, most: float, least: float = 0.0) -> dict[str, Any]:
    """Keys of the correction by importance sampling, as TRL has them."""
    named = {"correction": True, "mode": mode, "clip_max": most, "clip_min": least}
    return {f"rollout_importance_sampling_{name}": value for name, value in named.items()}


CASES: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "dapo, clip higher": dict(loss_type="dapo", epsilon_high=0.28),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-1),
    "gspo, summed by token": dict(loss_type="dapo", importance_sampling_level="sequence"),
    "k1": dict(loss_type="grpo", beta=0.3, kl_estimator="k1"),
    "k2": dict(loss_type="dapo", beta=0.3, kl_estimator="k2"),
    "k3": dict(loss_type="dr_grpo", beta=0.3, kl_estimator="k3"),
    "warm": dict(loss_type="dapo", temperature=0.7, beta=0.1),
    "truncated tokens": dict(loss_type="grpo", beta=0.1, **corrected("token_truncate", 1.5, 0.4)),
    "masked tokens": dict(loss_type="dapo", **corrected("token_mask", 1.5, 0.4)),
    "truncated sequences": dict(loss_type="dr_grpo", beta=0.1, **corrected("sequence_truncate", 2.0)),
    "masked sequences": dict(loss_type="dapo", temperature=0.7, beta=0.1, **corrected("sequence_mask", 2.0)),
    "gspo, masked sequences": dict(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=0.95, **corrected("sequence_mask", 2.0, 0.01)
    ),
    "rloo, truncated tokens": dict(
        loss_type="dr_grpo", advantage="rloo", scale_rewards="none", **corrected("token_truncate", 1.5)
    ),
}
SAMPLED_LOGS = {2: (-3.1, -1.2, -2.9, -1.9), 4: (-0.2,), 1: (-1.0,) * 6, 3: (-0.3, -0.4)}
"""By the length of the prompt: log-probabilities of each completion by weights that are not those of the trainer."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


class Given:
    """A last stage whose logits are the hidden states themselves."""

    vocab = (0, VOCAB)

    def logits(self, x_TV: Tensor, tokens: int) -> Tensor:
        return x_TV * 1.0


@dataclass
class Sequences:
    """What a microbatch was made of: of each sequence logits of its completion's tokens, ids, advantage, and so on."""

    tokens: Tokens
    x_TV: Tensor
    prompts: list[int]
    completions: list[list[int]]
    advantages: list[float]
    is_masked: list[bool]


def sequences(config: GRPOConfig, dtype: torch.dtype, later: bool, seed: int = 3) -> Sequences:
    """Random completions of unlike lengths, one of them cut off and masked."""
    dice = torch.Generator().manual_seed(seed)
    prompts, completions = [2, 4, 1, 3], [[1, 5, 2, 9], [3], [7, 7, 1, 0, 4, 10], [2, 6]]
    advantages, masked = [0.75, -1.25, 0.5, 0.0], [False, False, True, False]
    rows = [
        completion_row(range(prompt), Completion(tuple(ids), SAMPLED_LOGS[prompt], hidden), not hidden, advantage)
        for prompt, ids, advantage, hidden in zip(prompts, completions, advantages, masked, strict=True)
    ]
    tokens = tokens_of(rows)
    count = len(tokens.ids_T)
    more = {}
    if config.beta:
        more[REFERENCE] = torch.randn(count, generator=dice, dtype=torch.float64).to(dtype) * 0.3 - 2
    if later:
        more[OLD] = torch.randn(count, generator=dice, dtype=torch.float64).to(dtype) * 0.3 - 2
    tokens = replace(tokens, of_tokens={**tokens.of_tokens, **more})
    x_TV = torch.randn(count, VOCAB, generator=dice, dtype=torch.float64).to(dtype).requires_grad_()
    return Sequences(tokens, x_TV, prompts, completions, advantages, masked)


def objective(config: GRPOConfig) -> PolicyGradientLoss:
    mesh = Mesh(0, 1, range(1), solo(), Cut.__new__(Cut))
    return PolicyGradientLoss(policy_job(FOLDER, FOLDER, config), mesh, solo())


def slow_loss(config: GRPOConfig, given: Sequences) -> Tensor:
    """The sum that the step's denominator divides, token by token and number by number."""
    low, high = config.clip_range
    total, start = given.x_TV.new_zeros(()), 0
    for prompt, ids, advantage, hidden in zip(
        given.prompts, given.completions, given.advantages, given.is_masked, strict=True
    ):
        places = range(start + prompt - 1, start + prompt - 1 + len(ids))
        start += prompt + len(ids)
        if hidden:
            continue
        now = [
            torch.log_softmax(given.x_TV[at] / config.temperature, 0)[id_] for at, id_ in zip(places, ids, strict=True)
        ]
        old = [
            given.tokens.of_tokens[OLD][at] if OLD in given.tokens.of_tokens else one.detach()
            for at, one in zip(places, now, strict=True)
        ]
        logs = [a - b for a, b in zip(now, old, strict=True)]
        if config.importance_sampling_level == "sequence":
            logs = [torch.stack(logs).sum() / len(logs)] * len(logs)
        weights = slow_weights(
            config,
            [float(one) - float(given.tokens.of_tokens[SAMPLED][at]) for at, one in zip(places, old, strict=True)],
        )
        of_sequence = given.x_TV.new_zeros(())
        for at, one, log, weight in zip(places, now, logs, weights, strict=True):
            ratio = torch.exp(log)
            clipped = min(max(float(ratio.detach()), low), high)
            unclipped = ratio * advantage
            other = unclipped if clipped == float(ratio.detach()) else ratio.new_tensor(clipped * advantage)
            loss = -(unclipped if float(unclipped.detach()) <= float(other.detach()) else other) * weight
            if config.beta:
                reference = given.tokens.of_tokens[REFERENCE][at]
                r = reference - one
                loss = loss + config.beta * {"k1": -r, "k2": r * r / 2, "k3": torch.exp(r) - r - 1}[config.kl_estimator]
            of_sequence = of_sequence + loss
        total = total + (of_sequence / len(ids) if config.loss_type == "grpo" else of_sequence)
    return total


def slow_weights(config: GRPOConfig, logs: list[float]) -> list[float]:
    """Of each token of a completion, from log p by the trainer - log p by who sampled it: TRL's rules, by hand."""
    if not config.rollout_importance_sampling_correction:
        return [1.0] * len(logs)
    level, what = config.rollout_importance_sampling_mode.split("_")
    low, high = config.rollout_importance_sampling_clip_min, config.rollout_importance_sampling_clip_max
    ratios = [math.prod(map(math.exp, logs))] * len(logs) if level == "sequence" else [math.exp(log) for log in logs]
    if what == "truncate":
        return [max(low, min(ratio, high)) for ratio in ratios]
    return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_ratios_are_told_before_they_are_bounded(mode: str) -> None:
    """Both bounds are met in this data, so that each of them counts; what is not learned counts nowhere."""
    config = grpo(FOLDER, mask_truncated_completions=True, **corrected(mode, 1.5, 0.3))
    given = sequences(config, torch.float64, later=True)
    metrics = objective(config)(Given(), given.x_TV, given.tokens).metrics  # type: ignore[arg-type]
    ratios, start = [], 0
    for prompt, ids, hidden in zip(given.prompts, given.completions, given.is_masked, strict=True):
        places = range(start + prompt - 1, start + prompt - 1 + len(ids))
        start += prompt + len(ids)
        logs = [float(given.tokens.of_tokens[OLD][at] - given.tokens.of_tokens[SAMPLED][at]) for at in places]
        if not hidden:
            ratios += [math.exp(sum(logs))] if mode.startswith("sequence") else [math.exp(log) for log in logs]
    told = {name: metrics[f"{RATIO}/{name}"] for name in ("min", "mean", "max", "clipped_ratio")}
    assert told["min"].total == pytest.approx(min(ratios)) and told["max"].total == pytest.approx(max(ratios))
    assert told["mean"].total == pytest.approx(sum(ratios)) and told["mean"].count == len(ratios)
    assert min(ratios) < 0.3 and max(ratios) > 1.5
    assert told["clipped_ratio"].total == sum(not 0.3 <= ratio <= 1.5 for ratio in ratios)
    assert told["clipped_ratio"].count == len(ratios)


def test_a_ratio_that_is_no_number_any_more_is_told_as_the_largest() -> None:
    told = mismatch(torch.tensor([0.0, 1000.0]))
    assert told[MISMATCH_METRICS[1]].total == 1000 and told[f"{RATIO}/max"].total == pytest.approx(math.exp(20))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradient_are_the_papers(case: str, later: bool, dtype: torch.dtype) -> None:
    config = grpo(FOLDER, mask_truncated_completions=True, **CASES[case])
    given = sequences(config, dtype, later)
    found = objective(config)(Given(), given.x_TV, given.tokens)  # type: ignore[arg-type]
    (got_TV,) = torch.autograd.grad(found.loss, given.x_TV)
    exact_TV = given.x_TV.detach().double().requires_grad_()  # so that only one of the two rounds
    want = slow_loss(config, replace(given, x_TV=exact_TV))
    (want_TV,) = torch.autograd.grad(want, exact_TV)
    scale = max(1.0, float(want_TV.abs().max()))
    off, size = abs(float((found.loss - want).detach())), abs(float(want.detach()))
    assert off < TOLERANCE[dtype] * max(1.0, size)
    assert float((got_TV - want_TV).abs().max()) < TOLERANCE[dtype] * scale
    assert float(got_TV.abs().max()) > 1e-2


def test_ratios_of_the_first_pass_are_exactly_one_and_the_second_pass_reads_what_the_first_kept() -> None:
    config = grpo(FOLDER, num_iterations=2)
    given = sequences(config, torch.float32, later=False)
    room_T = torch.zeros(len(given.tokens.ids_T))
    first = replace(given.tokens, of_tokens={**given.tokens.of_tokens, KEPT: room_T})
    loss = objective(config)
    found = loss(Given(), given.x_TV, first)  # type: ignore[arg-type]
    learned = zip(given.completions, given.advantages, given.is_masked, strict=True)
    assert float(found.loss.detach()) == -sum(
        float(torch.tensor(a)) * len(ids) for ids, a, hidden in learned if not hidden
    )
    assert found.metrics["clip_ratio/region_mean"].total == 0
    again = replace(given.tokens, of_tokens={**given.tokens.of_tokens, OLD: room_T})
    assert float(loss(Given(), given.x_TV, again).loss.detach()) == float(found.loss.detach())  # type: ignore[arg-type]
    moved = loss(Given(), given.x_TV.detach() * 1.5, again)  # type: ignore[arg-type]
    assert moved.metrics["clip_ratio/region_mean"].total > 0
    assert bool((room_T[given.tokens.labels_T != IGNORED] < 0).all())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_of_an_estimate_is_the_divergence_where_it_is_unbiased(estimator: str) -> None:
    """k1 and k3 have the divergence as their mean under the policy; k2 is near it where distributions are near."""
    dice = torch.Generator().manual_seed(1)
    p_V = torch.randn(VOCAB, generator=dice, dtype=torch.float64).softmax(0)
    q_V = (p_V.log() + 0.05 * torch.randn(VOCAB, generator=dice, dtype=torch.float64)).softmax(0)
    want = float((p_V * (p_V / q_V).log()).sum())
    got = float((p_V * kl_estimate(p_V.log(), q_V.log(), estimator)).sum())
    assert abs(got - want) < (1e-12 if estimator != "k2" else 0.1 * want)


def test_what_is_clipped_is_told_by_its_side() -> None:
    config = grpo(FOLDER, epsilon=0.2)
    given = sequences(config, torch.float64, later=True)
    metrics = objective(config)(Given(), given.x_TV, given.tokens).metrics  # type: ignore[arg-type]
    low, high, region = (metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high", "region"))
    assert low.total + high.total == region.total > 0 and region.count == 7
    want_low = want_high = start = 0
    for prompt, ids, advantage, hidden in zip(
        given.prompts, given.completions, given.advantages, given.is_masked, strict=True
    ):
        for at, id_ in zip(itertools.count(start + prompt - 1), ids, strict=False):
            ratio = math.exp(
                float(torch.log_softmax(given.x_TV.detach()[at], 0)[id_]) - float(given.tokens.of_tokens[OLD][at])
            )
            want_low += not hidden and ratio < 0.8 and advantage < 0
            want_high += not hidden and ratio > 1.2 and advantage > 0
        start += prompt + len(ids)
    assert (low.total, high.total) == (want_low, want_high)
