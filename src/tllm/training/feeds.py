"""Makes the feed of a rank, of rows of the data or of completions that the run samples, and what evaluations sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm.text.chat_template import ChatTemplate
from tllm.training.data.batch_feed import BatchFeed
from tllm.training.data.feed import DataPosition, Feed
from tllm.training.data.prompt_batches import PromptBatches
from tllm.training.evaluation.forward_work import OtherEvaluation
from tllm.training.harness.harness_evaluation import HarnessEvaluation
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job_parts import is_evaluated_by_completions
from tllm.training.policy.completion_rewards import CompletionRewards
from tllm.training.policy.held_out_completions import HeldOutCompletions
from tllm.training.policy.held_out_rewards import HeldOutRewards
from tllm.training.policy.on_policy_rows import OnPolicyRows
from tllm.training.policy.policy_feed import PolicyFeed, SampledRows
from tllm.training.policy.rewarded_rows import RewardedRows
from tllm.training.policy.rollouts import Rollouts, sampling_of
from tllm.training.policy.sample_together import CompletionSampler, StepSampler
from tllm.training.policy.tool_turns import Tools, make_sampler
from tllm.training.questions.waiting_ranks import WaitingRanks
from tllm.training.reward_models.model_rewards import ModelRewards
from tllm.training.rollout_servers.remote_rollouts import RemoteRollouts
from tllm.training.rollout_servers.sampled_ahead import PositionAhead, SampledAhead
from tllm.training.state.initial_weights import InitialWeights
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.teachers.taught_batches import open_batches
from tllm.training.teachers.teacher_pool import TeacherPool
from tllm.training.tools.tool_schema import Schema
from tllm.training.tools.user_functions import UserModules

FeedAndPosition = tuple[Feed, DataPosition | None]
"""A feed, and on rank 0, who alone has an `InitialModel` and reads the data, the place in it."""


@dataclass(frozen=True)
class CompletionSource:
    """What samples completions on a rank; on rank 0 also what rewards them, where any are rewarded, and the tools that
    the model may call."""

    rollouts: Rollouts
    rewards: CompletionRewards | None = None
    tools: Tools | None = None

    def sampler(self, config: RankConfig) -> CompletionSampler:
        """What samples for steps, or for evaluations as for steps."""
        return make_sampler(config, self.rollouts, sampling_of(config.job), self.tools)

    @property
    def schemas(self) -> Sequence[Schema]:
        """Of the tools, as prompts show them."""
        return () if self.tools is None else self.tools.functions.schemas

    def close(self) -> None:
        """Let go of the cache, and end the threads of tools and of who scores."""
        self.rollouts.close()
        if self.rewards is not None:
            self.rewards.close()
        if self.tools is not None:
            self.tools.functions.close()


def rows_feed(
    config: RankConfig, initial_model: InitialModel | None, prefetch: int, with_positions: bool
) -> FeedAndPosition:
    """Of rows that stand in the data; the next `prefetch` steps are read meanwhile."""
    batches, links, size = None, config.groups.data, config.job.microbatch_size
    if initial_model is not None:
        still = WaitingRanks(links).still
        batches = open_batches(config.job, initial_model, config.answerers, config.stop, still)
    return BatchFeed(config.plan, links, size, batches, prefetch, with_positions), batches


def policy_feed(
    config: RankConfig,
    initial_model: InitialModel | None,
    source: CompletionSource,
    initial_weights: InitialWeights,
    policy: RankModel,
    with_positions: bool,
) -> FeedAndPosition:
    """Of completions that are sampled for each step. `policy` is the model that learns."""
    prompts, judged, job = None, None, config.job
    if initial_model is not None:
        prompts = initial_model.prompts(job, source.schemas)
        judged = _judged(config, initial_model, prompts, source.rewards)
    position: DataPosition | None = prompts
    sampler: StepSampler = source.sampler(config)
    if job.rollouts is not None and job.rollouts.max_staleness:
        assert isinstance(source.rollouts, RemoteRollouts), "checked when the run began"
        sampler = ahead = SampledAhead(config, source.rollouts, source.tools)
        position = None if prompts is None else PositionAhead(prompts, ahead)
    return PolicyFeed(config, sampler, judged, initial_weights, policy, with_positions), position


def _judged(
    config: RankConfig, initial_model: InitialModel, prompts: PromptBatches, rewards: CompletionRewards | None
) -> SampledRows:
    """What rank 0 makes of completions: rewards judge them, or a teacher."""
    job = config.job
    if job.distill is not None:
        still = WaitingRanks(config.groups.data).still
        teachers = TeacherPool.open(job, initial_model, config.answerers, config.stop, still)
        return OnPolicyRows(job, prompts, initial_model.reply_tokenizer.eos_ids, teachers)
    assert rewards is not None, "rank 0 has them where nothing else judges"
    return RewardedRows(job, prompts, rewards)


def completion_source(config: RankConfig, initial_model: InitialModel | None, rollouts: Rollouts) -> CompletionSource:
    """With the job's reward functions and tools, which rank 0 loads, once for steps and evaluations."""
    job = config.job
    if initial_model is None or job.rollouts is None or job.distill is not None:
        return CompletionSource(rollouts)
    tokenizer, modules, tools = initial_model.reply_tokenizer, UserModules(), None
    if job.rollouts.calls_tools:
        tools = Tools(job.rollouts, tokenizer, ChatTemplate.from_folder(initial_model.folder, tokenizer), modules)
    environments = None if tools is None else tools.functions.environments
    still = WaitingRanks(config.groups.data).still
    model = ModelRewards.open(job.rollouts, config.answerers, config.stop, job.deterministic, still)
    return CompletionSource(rollouts, CompletionRewards(job.rollouts, tokenizer, modules, environments, model), tools)


def other_evaluations(
    config: RankConfig, model: RankModel, initial_model: InitialModel | None, source: CompletionSource | None
) -> list[OtherEvaluation]:
    """What evaluations ask beside the loss of rows held out."""
    found: list[OtherEvaluation] = []
    sampled = _sampled_evaluation(config, initial_model, source)
    if sampled is not None:
        found.append(sampled)
    if config.job.lm_eval_tasks:
        folder = None if initial_model is None else initial_model.folder
        rollouts = None if source is None else source.rollouts
        found.append(HarnessEvaluation(config, model, rollouts, folder))
    return found


def _sampled_evaluation(
    config: RankConfig, initial_model: InitialModel | None, source: CompletionSource | None
) -> OtherEvaluation | None:
    """What evaluations ask of the model's own completions; None where the job wants none."""
    if source is None or not is_evaluated_by_completions(config.job):
        return None
    if config.job.rollouts is None:
        return HeldOutCompletions(config, source.rollouts, None if initial_model is None else initial_model.folder)
    prompts = None if initial_model is None else initial_model.eval_prompts(config.job, source.schemas)
    return HeldOutRewards(config, source.sampler(config), prompts, source.rewards)
