"""The feed of a rank: rows of the data as they are, or completions that the run samples."""

from __future__ import annotations

from tllm.training.data.batch_feed import BatchFeed
from tllm.training.data.feed import DataPosition, Feed
from tllm.training.job.initial_model import InitialModel
from tllm.training.policy.on_policy_rows import OnPolicyRows
from tllm.training.policy.policy_feed import PolicyFeed, SampledRows
from tllm.training.policy.rewarded_rows import RewardedRows
from tllm.training.policy.rollouts import Rollouts
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.teachers.taught_batches import open_batches
from tllm.training.teachers.teacher_pool import TeacherPool

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
    judged: SampledRows
    if config.job.distill is None:
        judged = RewardedRows(config.job, prompts, tokenizer)
    else:
        teachers = TeacherPool.open(config.job.distill, initial_model)
        judged = OnPolicyRows(config.job, prompts, tokenizer.eos_ids, teachers)
    return PolicyFeed(config, rollouts, judged, initial_weights, policy, with_positions), prompts
