"""The feed of a rank: rows of the data, or completions that the run samples; and what its evaluations sample."""

from __future__ import annotations

from tllm.training.data.batch_feed import BatchFeed
from tllm.training.data.feed import DataPosition, Feed
from tllm.training.evaluation.forward_work import SampledEvaluation
from tllm.training.job.initial_model import InitialModel
from tllm.training.policy.held_out_completions import HeldOutCompletions
from tllm.training.policy.policy_feed import PolicyFeed
from tllm.training.policy.rewarded_rows import RewardedRows
from tllm.training.policy.rollouts import Rollouts
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.teachers.taught_batches import open_batches

FeedAndPosition = tuple[Feed, DataPosition | None]
"""A feed, and on rank 0, who alone has an `InitialModel` and reads the data, the place in it."""


def rows_feed(
    config: RankConfig, initial_model: InitialModel | None, prefetch: int, with_positions: bool
) -> FeedAndPosition:
    """Of rows that stand in the data; the next `prefetch` steps are read meanwhile."""
    batches = None if initial_model is None else open_batches(config.job, initial_model)
    links, size = config.groups.data, config.job.microbatch_size
    return BatchFeed(config.plan, links, size, batches, prefetch, with_positions), batches


def policy_feed(
    config: RankConfig,
    initial_model: InitialModel | None,
    rollouts: Rollouts,
    initial_weights: InitialWeights,
    policy: RankModel,
    with_positions: bool,
) -> FeedAndPosition:
    """Of completions that are sampled for each step. `policy` is the model that learns."""
    if initial_model is None:
        return PolicyFeed(config, rollouts, None, initial_weights, policy, with_positions), None
    prompts, tokenizer = initial_model.prompts(config.job)
    rewarded = RewardedRows(config.job, prompts, tokenizer)
    return PolicyFeed(config, rollouts, rewarded, initial_weights, policy, with_positions), prompts


def sampled_evaluation(
    config: RankConfig, initial_model: InitialModel | None, rollouts: Rollouts | None
) -> SampledEvaluation | None:
    """What evaluations ask of the model's own completions; None where the job wants none."""
    if rollouts is None or not config.job.eval_num_prompts:
        return None
    return HeldOutCompletions(config, rollouts, None if initial_model is None else initial_model.folder)
