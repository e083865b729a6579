"""What cannot go with completions that are sampled in a run: refused before anything is started, with the reason."""

from __future__ import annotations

from tllm.core.errors import ConfigError, PlanError
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_parts import steps_of_one_sampling
from tllm.training.job.rollout_keys import RejectionConfig, RolloutConfig, kept_of_each_prompt

SAMPLING_TASKS = ("grpo", "rejection")


def check_rollouts(job: Job, plan: Plan, spec: ModelSpec) -> None:
    """PlanError or ConfigError for what cannot work."""
    config = job.rollouts
    if config is None:
        return
    _check_sizes(job, config, spec)
    _check_steps(job)
    _check_plan(job, plan)


def learned_rows(job: Job) -> int:
    """Rows of a step that are learned, at most."""
    config = job.rollouts
    if config is None:
        return job.global_batch_size
    return job.global_batch_size // config.num_generations * kept_of_each_prompt(config)


def _check_sizes(job: Job, config: RolloutConfig, spec: ModelSpec) -> None:
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
    if job.seq_len > spec.max_model_len:
        raise ConfigError(
            f"seq_len is {job.seq_len} and the model's context {spec.max_model_len} tokens", "lower seq_len"
        )
    if job.deterministic and isinstance(config, RejectionConfig) and config.threshold is not None:
        raise ConfigError(
            "deterministic=true and rejection.threshold: how many rows a step has, and with them the order of its "
            "sums, would hang on rewards",
            "leave one of them out",
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
    for name, plain in (("local_steps", 1), ("delay_steps", 0)):
        if getattr(job, name) != plain:
            raise PlanError(
                f"task={job.task} and {name}={getattr(job, name)}: completions are sampled from the weights that a "
                "step begins with, which would not be the same on all replicas or would lack the last step",
                f"leave {name} out",
            )


def _check_plan(job: Job, plan: Plan) -> None:
    tp = max(stage.tp for stage in plan.stages)
    if job.deterministic and plan.pp > 1:
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
                f"task={job.task} and {name} in the plan {plan}: {reason}",
                f"leave {name.split('=')[0]} out: dp, pp, tp, zero of 1 or 2 and any schedule of one chunk go with it",
            )
