"""Refuses what cannot be combined with sampled completions, with the reason, before anything is started."""

from __future__ import annotations

from tllm.core.errors import ConfigError, PlanError
from tllm.kernels.library import library
from tllm.kernels.paged_attention import fits
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_parts import is_sampled, role_plan, steps_of_one_sampling
from tllm.training.job.key_limits import ALONE, AUTO
from tllm.training.job.rollout_keys import RejectionConfig, RolloutConfig

SAMPLING_TASKS = ("grpo", "rejection")


def check_rollouts(job: Job, plan: Plan, spec: ModelSpec) -> None:
    """PlanError or ConfigError for what cannot work."""
    if job.eval_num_prompts:
        _check_eval_prompts(job)
    _check_turns(job, spec)
    if is_sampled(job):
        check_sampling_plan(job, plan, spec)
        _check_context(job, spec)
    config = job.rollouts
    if config is not None:
        _check_sizes(job, config)
        _check_rollout_plan(job, config, spec)
        _check_staleness(job, config)
        _check_steps(job)


def wants_batch_invariance(job: Job, spec: ModelSpec) -> bool:
    """Whether a token's numbers are to be the same whatever is computed beside it, where processors compute.

    That is what `deterministic` asks of a run that compares them (`grpo`), and what the kernels can do: not in float64,
    nor for heads whose width the kernel of attention does not take.
    """
    asks = job.deterministic and job.grpo is not None and job.dtype != "float64"
    return asks and library() is not None and all(_fits(spec, layer) for layer in spec.layers)


def _fits(spec: ModelSpec, layer: LayerSpec) -> bool:
    kv_heads = 1 if spec.latent else layer.num_kv_heads or spec.num_kv_heads
    shared = -(-spec.num_heads // kv_heads)
    return layer.delta is not None or fits(layer.head_dim or spec.head_dim, (0, shared))


def _check_eval_prompts(job: Job) -> None:
    """Completions to be read after an evaluation."""
    asked = f"eval_num_prompts is {job.eval_num_prompts}"
    if not job.eval_files:
        raise ConfigError(
            f"{asked} and eval_files is empty: prompts are those of rows held out",
            "give eval_files, or leave eval_num_prompts out",
        )
    if job.task == "reward":
        raise ConfigError(f"{asked} and a reward model writes nothing", "leave eval_num_prompts out")
    if job.task in SAMPLING_TASKS:
        raise ConfigError(
            f"{asked} and the evaluations of the task {job.task!r} sample completions of their own",
            f"leave eval_num_prompts out: {job.task}.num_completions_to_print says how many are written",
        )
    if job.eval_max_new_tokens >= job.seq_len:
        raise ConfigError(
            f"eval_max_new_tokens is {job.eval_max_new_tokens} and seq_len is {job.seq_len}",
            "seq_len holds a prompt and its completion: raise it, or ask for fewer tokens",
        )


def _check_context(job: Job, spec: ModelSpec) -> None:
    if job.seq_len > spec.max_model_len:
        raise ConfigError(
            f"seq_len is {job.seq_len} and the model's context {spec.max_model_len} tokens", "lower seq_len"
        )


def _check_sizes(job: Job, config: RolloutConfig) -> None:
    if job.global_batch_size % config.num_generations:
        raise ConfigError(
            f"global_batch_size is {job.global_batch_size} and {job.task}.num_generations is {config.num_generations}",
            "a step has whole groups of completions: make global_batch_size a multiple",
        )
    if config.max_completion_length >= job.seq_len:
        raise ConfigError(
            f"{job.task}.max_completion_length is {config.max_completion_length} and seq_len is {job.seq_len}",
            "seq_len holds a prompt and its completion: raise it, or sample fewer tokens",
        )
    if job.deterministic and isinstance(config, RejectionConfig) and config.threshold is not None:
        raise ConfigError(
            "deterministic=true and rejection.threshold: how many rows a step has, and with them the order of its "
            "sums, would hang on rewards",
            "leave one of them out",
        )


def _check_rollout_plan(job: Job, config: RolloutConfig, spec: ModelSpec) -> None:
    """The plan by which nodes that sample divide the model, where they do."""
    if config.rollout_plan not in (ALONE, AUTO):
        check_sampling_plan(job, role_plan(job, "rollout", spec.num_layers), spec)


def _check_staleness(job: Job, config: RolloutConfig) -> None:
    if config.max_staleness >= job.max_steps:
        raise ConfigError(
            f"{job.task}.max_staleness is {config.max_staleness} and max_steps is {job.max_steps}: the weights that "
            "the run begins with would sample all of it",
            "give fewer than max_steps",
        )


def _check_turns(job: Job, spec: ModelSpec) -> None:
    """Tokens of an earlier turn are computed again with a later one, which must come to the same."""
    grown = [
        layer.rope.original
        for layer in spec.layers
        if layer.rope is not None and layer.rope.kind == "dynamic" and layer.rope.original < job.seq_len
    ]
    calls_tools = job.rollouts is not None and job.rollouts.calls_tools
    if grown and (calls_tools or job.lm_eval_max_gen_toks):
        asked = "tools" if job.rollouts is not None and job.rollouts.tools else "environment_factory"
        what = f"{job.task}.{asked}" if calls_tools else "lm_eval_max_gen_toks"
        raise ConfigError(
            f"{what}, and seq_len is {job.seq_len}: this model's dynamic rope turns a token by the length of "
            f"its sequence beyond {min(grown)} tokens, which grows with each turn",
            f"give a seq_len of at most {min(grown)}, or leave {what} out",
        )


def _check_steps(job: Job) -> None:
    """A run is broken off only where new completions are sampled: those at hand are in no save."""
    together = steps_of_one_sampling(job)
    for name in ("max_steps", "save_steps"):
        if getattr(job, name) % together:
            raise ConfigError(
                f"{name} is {getattr(job, name)} and grpo.num_iterations is {together}: completions are kept in no "
                "save, so a run goes on where new ones are sampled",
                f"make {name} a multiple",
            )
    if job.early_stopping_patience and job.eval_steps % together:
        raise ConfigError(
            f"eval_steps is {job.eval_steps} and grpo.num_iterations is {together}: evaluations can end a run, and it "
            "ends where new completions are sampled",
            "make eval_steps a multiple",
        )
    for name, plain in (("local_steps", 1), ("delay_steps", 0)):
        if getattr(job, name) != plain:
            raise PlanError(
                f"task={job.task} and {name}={getattr(job, name)}: completions are sampled from the weights that a "
                "step begins with, which would not be the same on all replicas or would lack the last step",
                f"leave {name} out",
            )


def check_sampling_plan(job: Job, plan: Plan, spec: ModelSpec) -> None:
    """PlanError where ranks of this plan, who train or only sample, cannot sample for the job."""
    tp = max(stage.tp for stage in plan.stages)
    of_evaluations = "eval_num_prompts" if job.eval_num_prompts else "lm_eval_max_gen_toks"
    asked = f"{of_evaluations}={getattr(job, of_evaluations)}" if job.rollouts is None else f"task={job.task}"
    if job.rollouts is not None and job.deterministic and plan.pp > 1 and not wants_batch_invariance(job, spec):
        raise PlanError(
            f"task={job.task} with deterministic=true and pp={plan.pp}: stages divide the completions that are "
            "computed together, and products of fewer rows round in another way",
            "take pp=1: dp and zero of 1 or 2 do not change a bit",
        )
    reasons = {
        "cp": (plan.cp > 1, "completions are sampled one token at a time, which cannot be divided over ranks"),
        "ep": (plan.ep > 1, "replicas sample at their own pace and cannot wait for each other's tokens in each layer"),
        "zero=3": (plan.zero == 3, "replicas sample at their own pace and cannot gather weights from each other"),
        "servers": (plan.servers > 0, "completions are sampled from one state of the weights"),
        "chunks": (plan.chunks > 1, "a completion's ring passes each stage once"),
        "sequence=true": (plan.sequence and tp > 1, "one token of each completion cannot be sliced between ranks"),
    }
    for name, (is_asked, reason) in reasons.items():
        if is_asked:
            raise PlanError(
                f"{asked} and {name} in the plan {plan}: {reason}",
                f"leave {name.split('=')[0]} out: dp, pp, tp, zero of 1 or 2 and any schedule of one chunk go with it",
            )
