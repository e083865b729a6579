"""Parts of a job as others need them: data, learning rates, facts for the planner, snapshots. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from tllm.core.errors import ConfigError, counted
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import JudgeFacts, ProjectionFacts, SharedPrompts, TrainingFacts
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.training.data.batches import DataConfig
from tllm.training.data.dataset import Documents
from tllm.training.data.encoder import OverLong
from tllm.training.data.packing import RowLengths
from tllm.training.job.job import Job
from tllm.training.job.key_limits import ALONE, AUTO, WantedNodes
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.lr_schedule import LearningRateSchedule
from tllm.training.job.preference_tables import KTOConfig
from tllm.training.job.rollout_keys import FUNCTION, function_parts, kept_of_each_prompt

ROWS = "rows"
"""The folder, in that of the run, of rows that functions have given."""
STATES = {"adamw": 2, "sgd": 1}
"""Tensors that an optimizer keeps, each as large as the weights."""
LOSSY = ("int8", "powersgd")
"""Sums that keep what they did not send, a tensor as large as the weights on each replica."""


def row_file(job: Job, name: str) -> str:
    """The file of rows that a name in `train_files` means: itself, or where the run keeps what a function has given."""
    if not FUNCTION.fullmatch(name):
        return name
    module, function = function_parts(name)
    return str(Path(job.output_dir, ROWS, f"{module.stem}.{function}.jsonl"))


def data_config(job: Job) -> DataConfig:
    """What to read, over and over until the steps are done."""
    return DataConfig(
        files=tuple(row_file(job, name) for name in job.train_files),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        weights=job.train_weights,
        seed=job.seed,
        shuffle=job.shuffle,
        packing=job.packing,
        over_long=cast(OverLong, job.over_long),
        documents=cast(Documents, job.documents),
        add_eos=job.add_eos,
        draws=job.neftune_noise_alpha > 0 or (job.lora is not None and job.lora.lora_dropout > 0),
        rows=row_kind(job),
    )


def eval_data_config(job: Job) -> DataConfig:
    """The rows held out, each once, in the order of the files."""
    files = tuple(row_file(job, name) for name in job.eval_files)
    return replace(data_config(job), files=files, weights=None, shuffle=False, epochs=1)


def row_kind(job: Job) -> str:
    """What a row of the task's data is, as `choose_encoder` knows it."""
    match job.task:
        case "dpo" | "orpo" | "simpo":
            return "pairs"
        case "reward":
            return "scored_pairs"
        case "kto":
            return "mismatched" if (job.kto or KTOConfig()).loss_type == "kto" else "unpaired"
    return "texts"


def learning_rate_schedule(job: Job) -> LearningRateSchedule:
    """The factor of each step on `learning_rate`."""
    return LearningRateSchedule(
        kind=job.lr_scheduler_type,
        max_steps=job.max_steps,
        warmup_steps=job.warmup_steps,
        decay_steps=job.num_decay_steps,
        cycles=job.num_cycles,
        floor=job.min_lr_ratio,
    )


LM_EVAL = "lm_eval/"
"""What names of metrics of lm-evaluation-harness's tasks begin with."""

EVAL_PROMPTS_AT_ONCE = 32
"""Completions to be read after an evaluation that are computed together, where a run samples no others."""


TOLD_COPIES = 4
"""Of all log-probabilities of a row in a teacher that tells them: in parts, put together, as numbers, and as bytes."""


class JudgeSpecs(NamedTuple):
    """The models that judge rows for a job, from their configs alone; None where it has none, or names addresses."""

    teacher: ModelSpec | None = None
    reward: ModelSpec | None = None


NO_JUDGES = JudgeSpecs()


def training_facts(
    job: Job,
    mirrored: bool = False,
    judges: JudgeSpecs = NO_JUDGES,
    value_pass: bool = False,
    shares_prompts: bool = False,
    lengths: RowLengths | None = None,
) -> TrainingFacts:
    """What of a job decides its cost, of its roles those that its ranks have. `mirrored`: snapshots of steps are kept
    in memory. `judges`: where they are known. `value_pass`: whether the run is batch-invariant
    (`wants_batch_invariance`). `shares_prompts`: as the function of that name says. `lengths`: of what rows are made
    of, if that is known; else whole rows are counted."""
    shared = _prompts_to_share(job, lengths)
    documents, predicted = _documents(job, lengths)
    if job.task in ("grpo", "rejection") and shared is not None:
        predicted = shared.completion
    apart = role_nodes(job)
    return TrainingFacts(
        seq_len=job.seq_len,
        global_batch_size=learned_rows(job),
        microbatch_size=job.microbatch_size,
        dtype=job.dtype,
        states=STATES[job.optimizer],
        documents=documents,
        target_tokens=predicted,
        mean_lengths=lengths is not None,
        row_tokens=0 if lengths is None else round(lengths.of_row(job.seq_len, job.packing)),
        mirror_steps=snapshot_steps(job) if mirrored else 0,
        deterministic=job.deterministic,
        local_steps=job.local_steps,
        compression=job.gradient_compression,
        powersgd_rank=job.powersgd_rank,
        residual=job.gradient_compression in LOSSY,
        late=job.delay_steps > 0,
        adapter=None if job.lora is None else _adapter_facts(job.lora),
        projections=_projection_facts(job),
        sampling=None if is_sampled_apart(job) else sampling_facts(job),
        reference=job.task == "grpo" and job.grpo is not None and job.grpo.beta > 0,
        teacher=None if judges.teacher is None or "teacher" in apart else teacher_facts(job, judges.teacher),
        reward=None if judges.reward is None or "reward" in apart else reward_facts(job, judges.reward),
        # KTO asks mismatched replies, which are as long as a row's own, in a pass without gradients.
        value_pass=value_pass or (lengths is not None and row_kind(job) == "mismatched"),
        shared_prompts=shared if shares_prompts else None,
    )


def _documents(job: Job, lengths: RowLengths | None) -> tuple[tuple[int, ...], int | None]:
    """The documents of a row that are learned from, each of a prompt and a reply, and how many of its tokens are
    predicted; all where conversations are scored, of which each token has a score."""
    if lengths is None:
        return (), None
    count, prompt, reply = lengths.filling(job.seq_len, job.packing)
    count *= 1 if row_kind(job) == "mismatched" else lengths.parts
    return (prompt + reply,) * count, None if row_kind(job) == "scored_pairs" else reply * count


def _prompts_to_share(job: Job, lengths: RowLengths | None) -> SharedPrompts | None:
    """Of completions as long as they may be; of pairs as they fill a row. Unpaired replies are taken to have prompts of
    their own."""
    if lengths is not None:
        if row_kind(job) != "pairs":
            return None
        count, prompt, reply = lengths.filling(job.seq_len, job.packing)
        return SharedPrompts(prompt, reply, 2, of_row=2 * count)
    if (config := job.rollouts) is None:
        return None
    longest = config.max_completion_length
    return SharedPrompts(job.seq_len - longest, longest, config.num_generations)


def _projection_facts(job: Job) -> ProjectionFacts | None:
    keys = job.distill
    if keys is None or not keys.hidden_state_layers:
        return None
    return ProjectionFacts(tuple(student for student, _ in keys.hidden_state_layers), keys.teacher_hidden_size or 0)


def learned_rows(job: Job) -> int:
    """Rows of a step that are learned, at most."""
    config = job.rollouts
    if config is None:
        return job.global_batch_size
    return job.global_batch_size // config.num_generations * kept_of_each_prompt(config)


def sampling_facts(job: Job) -> SamplingFacts | None:
    """What the run samples itself: prompts and completions as long as they may be; None where it samples nothing."""
    if not is_sampled(job):
        return None
    config = job.rollouts
    if config is None:
        asked = EVAL_PROMPTS_AT_ONCE if job.lm_eval_max_gen_toks else job.eval_num_prompts
        longest = max(job.eval_max_new_tokens if job.eval_num_prompts else 0, job.lm_eval_max_gen_toks)
        at_once = min(EVAL_PROMPTS_AT_ONCE, asked)
        return SamplingFacts(job.seq_len - longest, longest, asked, 1, at_once, job.seq_len, share=0.0)
    return SamplingFacts(
        prompt=job.seq_len - config.max_completion_length,
        completion=config.max_completion_length,
        groups=job.global_batch_size // config.num_generations,
        num_generations=config.num_generations,
        at_once=min(config.max_num_seqs, job.global_batch_size),
        context=job.seq_len,
        one_by_one=job.deterministic and (job.grpo is None or job.dtype == "float64"),
        share=job.distill.lmbda if job.distill is not None else 1 / steps_of_one_sampling(job),
    )


def reward_facts(job: Job, model: ModelSpec) -> JudgeFacts:
    """What a step asks of a reward model: every prompt with its completion, each as long as it may be."""
    assert job.rollouts is not None, "somebody is rewarded"
    row = min(job.seq_len, model.max_model_len)
    return JudgeFacts(model, job.rollouts.reward_dtype, job.global_batch_size * row, row)


def teacher_facts(job: Job, teacher: ModelSpec) -> JudgeFacts:
    """What a step asks of a teacher: every row, each as long as it may be."""
    assert job.distill is not None, "a student has a teacher"
    tokens, told = job.global_batch_size * job.seq_len, job.distill.hidden_state_bytes
    if not job.distill.top_k:
        told += TOLD_COPIES * 4 * teacher.vocab_size
    return JudgeFacts(teacher, job.distill.teacher_dtype, tokens, job.seq_len, told)


def learns_from_own_tokens(job: Job, servers: int = 0) -> bool:
    """Whether a replica's gradient is the mean over its own tokens: in local steps, and where replicas do not wait for
    each other at `servers`. Else it is a part of the mean over all tokens of a step."""
    return job.local_steps > 1 or (servers > 0 and job.max_staleness != 0)


def can_mirror(job: Job, servers: int = 0) -> bool:
    """Whether snapshots of steps are kept in memory; never of servers, whose weights are of no one step."""
    return job.mirror_steps > 0 and not servers


def states_of(job: Job) -> tuple[object, ...]:
    """What of a job decides which states ranks keep between steps: snapshots are of use only where it is the same."""
    reduced = job.gradient_compression, job.powersgd_rank
    beside = () if job.distill is None else (job.distill.hidden_state_layers, job.distill.teacher_hidden_size)
    return job.dtype, job.optimizer, *reduced, job.local_steps, job.delay_steps, job.lora, *beside


def steps_of_one_sampling(job: Job) -> int:
    """Steps that learn from the same completions, after which a run can be broken off and go on; 1 without any."""
    return job.grpo.num_iterations if job.task == "grpo" and job.grpo is not None else 1


def shares_prompts(job: Job, spec: ModelSpec, device: str = "cpu", cp: int = 1) -> bool:
    """Whether completions of one prompt that are learned together, the two replies of a pair, or unpaired replies to
    one prompt that follow one another, have its tokens computed once for all of them (`training.step.shared_prompts`).

    Not where that would change more than the rounding: over how many tokens the experts' loads are added up; of
    preferences, whose replies are of unlike lengths, rope by a row's length and numbers drawn for each token. Nor with
    states that each sequence has of its own, in a ring of context parallelism, or where numbers are to be those of the
    engine to the bit. On other devices than processors it would take attention from their fast kernels: prompts are
    shared where this holds by the `device` of every rank (`with_shared_prompts`). "auto" is taken for a processor.
    """
    is_changed = job.router_aux_loss_coef > 0 or job.deterministic
    has_states = any(layer.delta for layer in spec.layers)
    if row_kind(job) in ("pairs", "mismatched", "unpaired"):
        is_changed = is_changed or spec.scales_by_length or data_config(job).draws
    elif job.task != "grpo":
        return False
    return not is_changed and not has_states and device in ("cpu", "auto") and cp == 1


def is_evaluated_by_completions(job: Job) -> bool:
    """Whether evaluations sample completions, some of which are to be read."""
    return job.eval_num_prompts > 0 or (job.rollouts is not None and bool(job.eval_files))


def is_sampled(job: Job) -> bool:
    """Whether the run samples completions, to learn from, to be read or for tasks of lm-eval."""
    return job.rollouts is not None or is_evaluated_by_completions(job) or job.lm_eval_max_gen_toks > 0


def is_sampled_apart(job: Job) -> bool:
    """Whether completions are sampled by servers elsewhere, or by nodes of the cluster that do not train."""
    return job.rollouts is not None and bool(job.rollouts.rollout_servers or job.rollouts.rollout_nodes)


def role_nodes(job: Job) -> dict[RoleName, WantedNodes]:
    """The nodes that are to have a role beside the plan, by the role; none of those that the job does not have."""
    found: dict[RoleName, WantedNodes] = {}
    if job.distill is not None and job.distill.teacher_nodes:
        found["teacher"] = WantedNodes.of(job.distill.teacher_nodes, role_key(job, "teacher"))
    if job.rollouts is not None and job.rollouts.rollout_nodes:
        found["rollout"] = WantedNodes.of(job.rollouts.rollout_nodes, role_key(job, "rollout"))
    if job.rollouts is not None and job.rollouts.reward_nodes:
        found["reward"] = WantedNodes.of(job.rollouts.reward_nodes, role_key(job, "reward"))
    return found


def role_key(job: Job, role: RoleName) -> str:
    """The key that says which nodes have a role."""
    return f"{job.task}.{role}_nodes"


def role_plan_text(job: Job, role: RoleName) -> str:
    """As the job has it, by which nodes of one model divide it; each a whole one where the task has no such key."""
    text: str = getattr(getattr(job, job.task, None), f"{role}_plan", ALONE)
    return text


def role_plan(job: Job, role: RoleName, num_layers: int) -> Plan:
    """PlanError for one that does not fit the model."""
    plan = Plan.parse(role_plan_text(job, role), num_layers)
    plan.check(num_layers)
    return plan


def check_teams(job: Job, role: RoleName, wanted: WantedNodes, size: int) -> None:
    """ConfigError where nodes would be left over, as each model takes `size` of them."""
    if wanted.count % size:
        raise ConfigError(
            f"{role_key(job, role)} gives {counted(wanted.count, 'node')}, and by {job.task}.{role}_plan = "
            f"{role_plan_text(job, role)!r} each {role} takes {size}",
            f"give a multiple of {counted(size, 'node')}",
        )


def with_role_plans(job: Job, facts: TrainingFacts, spec: ModelSpec) -> TrainingFacts:
    """Facts of all roles, with the plans by which nodes divide their models, where the job says them; `spec` is of the
    model that is trained. ConfigError where nodes would be left over."""

    def plan(role: RoleName, num_layers: int) -> Plan | None:
        if role_plan_text(job, role) in (ALONE, AUTO):
            return None
        found = role_plan(job, role, num_layers)
        check_teams(job, role, role_nodes(job)[role], found.world_size)
        return found

    teacher, reward, sampling = facts.teacher, facts.reward, facts.sampling
    return replace(
        facts,
        teacher=teacher and replace(teacher, plan=plan("teacher", teacher.spec.num_layers)),
        reward=reward and replace(reward, plan=plan("reward", reward.spec.num_layers)),
        sampling=sampling and replace(sampling, plan=plan("rollout", spec.num_layers)),
    )


def with_role_nodes(job: Job, role: RoleName, nodes: Sequence[int | str], plan: str = "") -> Job:
    """The job with other nodes for a role, and with another `plan` if one is given; without nodes the ranks that train
    do it, and nothing is sampled ahead."""
    table = getattr(job, job.task)
    changed: dict[str, object] = {f"{role}_nodes": tuple(nodes)}
    if plan or not nodes:
        changed[f"{role}_plan"] = plan if nodes else ALONE
    if role == "rollout" and not nodes:
        changed["max_staleness"] = 0
    table = replace(table, **changed)
    return replace(job, **{job.task: table})


def check_no_auto(job: Job, reason: str) -> None:
    """ConfigError where the planner is to say which nodes have a role or by which plan, and cannot for this reason."""
    for role, wanted in role_nodes(job).items():
        if wanted.is_auto:
            raise ConfigError(
                f'{role_key(job, role)} is "auto", and {reason}', "give the number of nodes, or their names"
            )
        if role_plan_text(job, role) == AUTO:
            raise ConfigError(
                f'{job.task}.{role}_plan is "auto", and {reason}',
                'give a plan: "pp=2" divides the model over two nodes',
            )


def snapshot_steps(job: Job) -> int:
    """Steps between snapshots, 0 for none. With DiLoCo at outer steps, when replicas have the same weights."""
    together = max(job.local_steps, steps_of_one_sampling(job))
    return -(-job.mirror_steps // together) * together


def is_snapshot_step(job: Job, step: int) -> bool:
    """Whether a snapshot is taken after this step."""
    every = snapshot_steps(job)
    return every > 0 and (step % every == 0 or (step == job.max_steps and step % job.local_steps == 0))


def _adapter_facts(lora: LoraJob) -> AdapterFacts:
    left_out = lora.exclude_modules, lora.layers_to_transform
    drops = lora.lora_dropout > 0
    return AdapterFacts(lora.r, lora.target_modules, lora.few_bits, lora.use_dora, *left_out, drops)
