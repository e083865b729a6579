"""Refuses combinations of job, plan and model that cannot work, with the reason, before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from tllm.core.errors import ConfigError, PlanError, counted
from tllm.core.memory import amount
from tllm.parallel.lora.adapted_model import OF_LATENTS
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.plan_text import divides_layers
from tllm.spec.trainable import check_trainable
from tllm.training.data.batch_feed import LIMIT
from tllm.training.data.packing import deal
from tllm.training.gradients.accumulation_order import check_deterministic
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.job_parts import LM_EVAL, learned_rows, learning_rate_schedule, role_nodes, role_plan_text
from tllm.training.job.key_limits import ALONE, AUTO
from tllm.training.job.preference_tables import PREFERENCE_TABLES
from tllm.training.job.rollout_combinations import SAMPLING_TASKS, check_rollouts
from tllm.training.job.rollout_keys import GRPOConfig, RolloutConfig
from tllm.training.job.target_modules import adapted_modules

log = logging.getLogger("tllm.training")


def check_combination(job: Job, plan: Plan, spec: ModelSpec) -> None:
    """PlanError, or ConfigError of the job alone, for what cannot work."""
    learning_rate_schedule(job)
    _check_head(job, spec)
    plan.check(spec.num_layers)
    total = microbatches_of(job)
    counts = [len(part) for part in deal(total, plan.dp)]
    check_trainable(plan, spec, counts)
    _check_experts(job, spec)
    _check_servers(job, plan, counts)
    _check_communication(job, plan)
    _check_lora(job, plan, spec)
    _check_grid(job, plan)
    check_rollouts(job, plan, spec)
    _check_distillation(job, plan, spec)
    _check_hidden_state_bytes(job, plan, counts)
    _check_forward_passes(job, plan)
    _check_eval_files(job)
    _check_lm_eval(job, plan)
    _check_noise(job)
    _check_unread(job)
    if job.deterministic:
        check_deterministic(plan, total, spec.tied)
        _check_deterministic_roles(job)


def _check_deterministic_roles(job: Job) -> None:
    """A role's bits are those of the run in one process, which has the whole model beside it."""
    for role in role_nodes(job):
        text = role_plan_text(job, role)
        if text == AUTO or (text != ALONE and divides_layers(text)):
            chosen = ", which may be chosen," if text == AUTO else ""
            raise ConfigError(
                f"{job.task}.{role}_plan is {text!r} and deterministic=true: tensor parallelism{chosen} adds parts of "
                "sums in another order than one rank does",
                'give a plan by pp alone, such as "pp=2", or leave deterministic out',
            )


def warn_of_context(job: Job, spec: ModelSpec) -> None:
    """Say that rows may be longer than any server of the model computes. Runs that sample are refused for it."""
    if job.seq_len > spec.max_model_len:
        log.warning(
            "seq_len is %d and the model's context %d tokens: a document that is longer is learned at places that no "
            "server of the model computes; give seq_len = %d, or the config.json of a model with a longer context",
            *(job.seq_len, spec.max_model_len, spec.max_model_len),
        )


def warn_of_idle(job: Job, plan: Plan) -> None:
    """Say that replicas of a plan learn from nothing, as they get no microbatch of a step."""
    total = microbatches_of(job)
    if idle := [len(part) for part in deal(total, plan.dp)].count(0):
        log.warning(
            "a step has %s for %d replicas, and %d without any: give a smaller microbatch_size than %d, a "
            "larger global_batch_size than %d, or fewer replicas",
            *(
                counted(total, "microbatch", "microbatches"),
                plan.replicas,
                idle,
                job.microbatch_size,
                job.global_batch_size,
            ),
        )


def microbatches_of(job: Job) -> int:
    """Of a step, over all replicas."""
    return -(-learned_rows(job) // job.microbatch_size)


class ReadWhere(NamedTuple):
    """Keys that are read only where `is_read`; else `why` nothing reads them, and what else to give (`hint`)."""

    keys: tuple[str, ...]
    is_read: bool
    why: str
    hint: str


def _check_unread(job: Job) -> None:
    """A value that nothing would read, beside the others as they are, would be passed over in silence."""
    _refuse_unread("", job, _read_where(job))
    if job.rollouts is not None and job.distill is None:
        _refuse_unread(f"{job.task}.", job.rollouts, _read_where_sampled(job, job.rollouts))
    if job.distill is not None:
        _refuse_unread("distill.", job.distill, _read_where_taught(job.distill))


def _refuse_unread(prefix: str, table: Job | RolloutConfig | DistillationKeys, rules: Iterable[ReadWhere]) -> None:
    defaults = {field.name: field.default for field in fields(table)}
    for keys, is_read, why, hint in rules:
        for key in keys:
            if not is_read and getattr(table, key) != defaults[key]:
                raise ConfigError(
                    f"{prefix}{key} is {getattr(table, key)} and would not be read: {why}",
                    f"leave {key} out, or give {hint}",
                )


def _read_where(job: Job) -> tuple[ReadWhere, ...]:
    is_adamw, is_powersgd = job.optimizer == "adamw", job.gradient_compression == "powersgd"
    is_evaluated = bool(job.eval_files or job.lm_eval_tasks)
    is_compared = job.early_stopping_patience > 0 or job.load_best_model_at_end
    compared = "early_stopping_patience or load_best_model_at_end"
    texts = [name for name in (*job.train_files, *job.eval_files) if name.removesuffix(".gz").endswith(".txt")]
    return (
        ReadWhere(("momentum",), not is_adamw, "optimizer is adamw, which has adam_beta1", 'optimizer = "sgd"'),
        ReadWhere(("adam_beta1", "adam_beta2", "adam_epsilon"), is_adamw, "optimizer is sgd", 'optimizer = "adamw"'),
        ReadWhere(
            ("powersgd_rank",), is_powersgd, "gradients are not compressed so", 'gradient_compression = "powersgd"'
        ),
        ReadWhere(
            ("outer_learning_rate", "outer_momentum"), job.local_steps > 1, "local_steps is 1", "local_steps above 1"
        ),
        ReadWhere(("documents",), bool(texts), "no file of rows is a .txt", "a text file in train_files"),
        ReadWhere(
            ("add_eos",),
            job.task not in SAMPLING_TASKS,
            f"the task {job.task!r} takes prompts from the rows, and completions end as the model ends them",
            "another task",
        ),
        ReadWhere(("eval_steps",), is_evaluated, "nothing is evaluated", "eval_files or lm_eval_tasks"),
        ReadWhere(("eval_max_new_tokens",), job.eval_num_prompts > 0, "no prompts are completed", "eval_num_prompts"),
        ReadWhere(
            ("early_stopping_threshold",),
            job.early_stopping_patience > 0,
            "no evaluation ends the run",
            "early_stopping_patience",
        ),
        ReadWhere(
            ("metric_for_best_model", "greater_is_better"), is_compared, "evaluations are not compared", compared
        ),
    )


def _read_where_sampled(job: Job, config: RolloutConfig) -> Iterator[ReadWhere]:
    """Of the tables `[grpo]` and `[rejection]`."""
    yield ReadWhere(("rollout_secret",), bool(config.rollout_servers), "no servers are named", "rollout_servers")
    yield ReadWhere(("reward_dtype",), bool(config.reward_model), "no model gives rewards", "reward_model_name_or_path")
    yield ReadWhere(("max_tool_calling_iterations",), config.calls_tools, "there are no tools", "tools")
    yield ReadWhere(("num_generations_eval",), bool(job.eval_files), "nothing is evaluated", "eval_files")
    if isinstance(config, GRPOConfig):
        of_ratios = tuple(f"rollout_importance_sampling_{end}" for end in ("mode", "clip_max", "clip_min"))
        why = "ratios to the weights that sampled weigh nothing"
        yield ReadWhere(("kl_estimator",), config.beta > 0, "beta is 0: there is no divergence", "beta above 0")
        yield ReadWhere(of_ratios, config.is_corrected, why, "rollout_importance_sampling_correction = true")


def _read_where_taught(keys: DistillationKeys) -> Iterator[ReadWhere]:
    """Of the table `[distill]`."""
    sampled = ("max_completion_length", "mask_truncated_completions", "max_num_seqs")
    compared = ("hidden_state_loss", "hidden_state_loss_weight", "hidden_state_dtype")
    yield ReadWhere(sampled, keys.lmbda > 0, "lmbda is 0: the student writes nothing", "lmbda above 0")
    yield ReadWhere(("rollout_secret",), bool(keys.rollout_servers), "no servers are named", "rollout_servers")
    yield ReadWhere(("teacher_secret",), bool(keys.teachers), "no addresses of teachers are named", "teachers")
    yield ReadWhere(
        ("teacher_dtype",),
        not keys.teachers,
        "teachers elsewhere compute in what they were started with",
        "--dtype to `tllm teach`",
    )
    yield ReadWhere(compared, bool(keys.hidden_state_layers), "no hidden states are named", "hidden_state_layers")


def _check_head(job: Job, spec: ModelSpec) -> None:
    """A reward model has a head with one score; all other tasks need one for tokens."""
    if job.task != "reward" and spec.num_labels:
        raise ConfigError(
            f"the model has a classification head of {counted(spec.num_labels, 'label')}, and the task "
            f"{job.task!r} is for models that write",
            'give the folder of a causal language model, or task = "reward"',
        )
    if spec.bidirectional:
        raise ConfigError(
            "each token of the model sees those after it (it is not causal), and training is of models that do not",
            "give the folder of a causal language model",
        )
    if spec.is_headless:
        raise ConfigError(
            "the model was saved without its head for tokens (lm_head.weight)",
            "give the folder of a causal language model",
        )
    if job.task == "reward" and spec.num_labels != 1:
        raise ConfigError(
            f"a reward model gives one score and this model's head has {counted(spec.num_labels, 'label')}",
            "give the folder of a causal language model, or of one with num_labels 1",
        )


def _check_forward_passes(job: Job, plan: Plan) -> None:
    """What is computed of all replicas together needs one model: preferences' references and metrics, evaluations."""
    evaluations = "eval_files" if job.eval_files else "lm_eval_tasks" if job.lm_eval_tasks else ""
    asked = f"the task {job.task!r}" if job.task in PREFERENCE_TABLES else evaluations
    for name, taken in (("servers", plan.servers > 0), ("local_steps", job.local_steps > 1)):
        if asked and taken:
            raise PlanError(
                f"{name} and {asked}: losses and metrics are of all replicas together, which then have weights of "
                "their own",
                f"leave out {name}, or {asked}",
            )


def _check_eval_files(job: Job) -> None:
    if job.early_stopping_patience:
        _check_compared(job, "early_stopping_patience", str(job.early_stopping_patience))
    if job.load_best_model_at_end:
        _check_compared(job, "load_best_model_at_end", "true")
        _check_best_model(job)
    if job.eval_files and job.task == "distill":
        raise ConfigError(
            f"eval_files and the task {job.task!r}: rows held out have no teacher",
            "leave eval_files out, and evaluate the finished model",
        )


def _check_lm_eval(job: Job, plan: Plan) -> None:
    """Tasks of lm-evaluation-harness within the run."""
    others = ("num_fewshot", "limit", "include_path", "apply_chat_template", "max_gen_toks")
    given = [name for name in (f"lm_eval_{other}" for other in others) if getattr(job, name) not in (None, 0, False)]
    if not job.lm_eval_tasks:
        if given:
            raise ConfigError(f"{given[0]} is given and lm_eval_tasks is empty", f"name tasks, or leave {given[0]} out")
        return
    if job.task == "reward":
        raise ConfigError("lm_eval_tasks and a reward model, which gives no token a probability", "leave them out")
    if plan.grid is not None:
        raise PlanError(
            f"lm_eval_tasks and a grid in the plan {plan}: probabilities of whole continuations are not computed on it",
            "leave out lm_eval_tasks, or take tensor parallelism of one dimension",
        )
    if job.lm_eval_max_gen_toks >= job.seq_len:
        raise ConfigError(
            f"lm_eval_max_gen_toks is {job.lm_eval_max_gen_toks} and seq_len is {job.seq_len}",
            "seq_len holds a question and what is generated: raise it, or generate fewer tokens",
        )


def _check_compared(job: Job, key: str, value: str) -> None:
    """What compares evaluations needs a number of each: of rows held out, or of a task that is named."""
    named = (job.metric_for_best_model or "").removeprefix("eval_")
    if not job.eval_files and not (job.lm_eval_tasks and named.startswith(LM_EVAL)):
        raise ConfigError(
            f"{key} is {value} and eval_files is empty: nothing says which model is the best",
            f"give eval_files, or lm_eval_tasks with a metric_for_best_model of them, or leave {key} out",
        )


def _check_best_model(job: Job) -> None:
    """The best model is that of a save, so it must have been evaluated as it is saved."""
    if job.save_steps % job.eval_steps:
        raise ConfigError(
            f"load_best_model_at_end is true, save_steps is {job.save_steps} and eval_steps is {job.eval_steps}: the "
            "best model is that of a save, and each must have its evaluation",
            "make save_steps a multiple of eval_steps; the same number for both lets the best of all evaluations be "
            "taken",
        )
    if job.delay_steps:
        raise ConfigError(
            f"load_best_model_at_end is true and delay_steps is {job.delay_steps}: a save has the update that was on "
            "its way when its step was evaluated",
            "leave one of them out",
        )


def _check_noise(job: Job) -> None:
    """Noise would part the log-probabilities that are trained from those that completions were sampled with."""
    dropout = 0.0 if job.lora is None else job.lora.lora_dropout
    keys = (("neftune_noise_alpha", job.neftune_noise_alpha, "noise"), ("lora.lora_dropout", dropout, "dropout"))
    for name, value, what in keys:
        if value and job.rollouts is not None:
            raise ConfigError(
                f"{name} is {value:g} and the task {job.task!r} learns from completions, which are sampled without "
                f"{what}",
                f"leave {name} out",
            )


def _check_experts(job: Job, spec: ModelSpec) -> None:
    moes = [layer.moe for layer in spec.layers if layer.moe]
    if job.router_aux_loss_coef and not moes:
        raise PlanError(
            f"router_aux_loss_coef is {job.router_aux_loss_coef} and the model has no experts", "leave it out"
        )
    if job.router_aux_loss_coef and any(moe.scores != "softmax" for moe in moes):
        raise PlanError(
            f"router_aux_loss_coef is {job.router_aux_loss_coef} and the router's scores are no probabilities: each is "
            "a sigmoid of its own, and what balances such a model is its correction bias, which stays as it is",
            "leave it out",
        )
    if job.lora is None and job.dtype == "bfloat16" and any(moe.correction_bias for moe in moes):
        raise PlanError(
            f"the correction bias of a {spec.family} router needs float32 and the job's dtype is {job.dtype}",
            "give dtype: float32, or train an adapter ([lora]), beside which it keeps its float32",
        )


def _check_lora(job: Job, plan: Plan, spec: ModelSpec) -> None:
    """An adapter is trained beside weights that stay as they are, and that each replica holds whole."""
    if job.lora is None:
        return
    if job.model_name_or_path is None:
        raise ConfigError(
            "[lora] trains an adapter of a model, and config_name begins with random weights, which nobody else has",
            "give model_name_or_path, or leave [lora] out",
        )
    if plan.zero == 3:
        raise PlanError(
            f"plan {plan} has zero=3, which shares out weights that are trained, and with [lora] the model's are not",
            "take zero=2, and pp or tp to hold a part of the model on each rank; lora.quantize makes it smaller",
        )
    if plan.servers:
        raise PlanError(
            f"plan {plan} has servers={plan.servers}, which keep a whole model's weights, and [lora] trains an adapter",
            "leave servers out: what replicas sum of an adapter is small",
        )
    if job.task == "reward":
        raise ConfigError(
            '[lora] and task = "reward": the head that scores is learned whole, and an adapter has none',
            "leave [lora] out",
        )
    if job.lora.few_bits is not None and spec.quantization is not None:
        raise ConfigError(
            f"lora.quantize rounds plain weights to {job.lora.quantize}, and those of this model have few bits already "
            f"({spec.quantization.method})",
            "leave lora.quantize out: they stay as the files have them",
        )
    of_latents = [name for name in adapted_modules(job.lora, spec) if name.endswith(OF_LATENTS)]
    if of_latents and plan.schedule == "zero_bubble":
        raise PlanError(
            f"plan {plan} has schedule=zero_bubble, which takes the gradients of weights apart, and {of_latents[0]} is "
            "adapted, whose A and B are used twice in a row, for keys and for values",
            "give another schedule, or name target_modules without kv_b_proj",
        )


def _check_grid(job: Job, plan: Plan) -> None:
    """What goes with weights and activations that are cut both ways: pre-training, and fine-tuning of all weights."""
    if plan.grid is None:
        return
    for name, taken in (
        ("[lora]", job.lora is not None),
        (f"task = {job.task!r}", job.task != "sft"),
        (f"neftune_noise_alpha = {job.neftune_noise_alpha:g}", job.neftune_noise_alpha > 0),
    ):
        if taken:
            raise PlanError(
                f"tensor={plan.tensor} and {name}: on a grid all weights are learned, from next tokens alone",
                f"leave tensor out, or {name}",
            )


def _check_distillation(job: Job, plan: Plan, spec: ModelSpec) -> None:
    keys = job.distill
    if keys is None:
        return
    if keys.top_k >= spec.vocab_size:
        raise PlanError(
            f"distill.top_k is {keys.top_k} and the model has {spec.vocab_size} tokens",
            "give less, or 0 for all of them",
        )
    layers, seen = spec.num_layers, set[tuple[int, int]]()
    for student, teacher in keys.hidden_state_layers:
        number = spec.hidden_state(student)
        if number is None:
            raise ConfigError(
                f"distill.hidden_state_layers names the student's hidden state {student} and it has "
                f"{counted(layers, 'layer')}",
                f"give 0, the embedding, to {layers}, the last; or -1, the last, to {-layers - 1} from the end",
            )
        if (number, teacher) in seen:
            raise ConfigError(
                f"distill.hidden_state_layers names [{student}, {teacher}] twice: the student has "
                f"{counted(layers, 'layer')}",
                "name each pair once",
            )
        seen.add((number, teacher))
    if keys.hidden_state_layers and plan.servers:
        raise PlanError(
            f"plan {plan} has servers={plan.servers}, which keep the model's weights, and distill.hidden_state_layers "
            "has projections learned beside it",
            "leave one of them out",
        )


def _check_hidden_state_bytes(job: Job, plan: Plan, counts: Sequence[int]) -> None:
    """A step's rows go to a rank in one message, and a row from a teacher. `counts` are the replicas' microbatches."""
    if job.distill is None or not job.distill.hidden_state_layers:
        return
    rows = max(counts) * job.microbatch_size if plan.world_size > 1 else 1
    taken = rows * job.seq_len * job.distill.hidden_state_bytes
    if taken > LIMIT:
        raise PlanError(
            f"the teacher's hidden states of {rows} rows of {job.seq_len} tokens take {amount(taken)} at "
            f"{amount(job.distill.hidden_state_bytes)} a token, and one message has at most {amount(LIMIT)}",
            'name fewer in distill.hidden_state_layers, give hidden_state_dtype = "bfloat16", or a smaller step',
        )


def _check_servers(job: Job, plan: Plan, counts: Sequence[int]) -> None:
    """Refuse a plan with servers that cuts replicas: each holds the whole model, on one rank.

    `counts` are the replicas' microbatches of a step.
    """
    if not plan.servers:
        return
    if plan.replica_size > 1:
        raise PlanError(
            f"plan {plan} has servers={plan.servers} and replicas of {counted(plan.replica_size, 'rank')}",
            "with servers each replica is one rank: leave pp, tp and cp at 1, or leave servers out",
        )
    for name, plain in (("ep", 1), ("zero", 0), ("offload", "none")):
        if getattr(plan, name) != plain:
            raise PlanError(
                f"plan {plan} has servers={plan.servers} and {name}={getattr(plan, name)}",
                f"servers hold all of the optimizer's state and every expert: leave {name} out",
            )
    if job.max_staleness and not counts[0]:
        raise PlanError(
            f"replica 0 has none of the {counted(sum(counts), 'microbatch', 'microbatches')} of a step, and "
            "where replicas do not wait for each "
            f"other (max_staleness={job.max_staleness}) it tells the losses of its own",
            "give replica 0 a larger share",
        )


def _check_communication(job: Job, plan: Plan) -> None:
    """The ways to send less, of which a run takes one, with or without compression."""
    local, late, served = job.local_steps > 1, job.delay_steps > 0, plan.servers > 0
    if local + late + served > 1:
        named = {"local_steps": local, "delay_steps": late, "servers": served}
        both = " and ".join(name for name, taken in named.items() if taken)
        raise PlanError(f"{both} are two answers to one question: when replicas hear of each other", "take one")
    for name, taken, shared in (
        ("local_steps", local, "zero" if plan.zero else "ep"),
        ("delay_steps", late, "ep"),
    ):
        if taken and getattr(plan, shared) > (shared == "ep"):
            raise PlanError(
                f"{name} and {shared}: replicas that are out of step cannot share their weights",
                f"leave out {shared}, or {name}",
            )
    for name, taken in (("local_steps", local), ("delay_steps", late)):
        if taken and job.deterministic:
            raise PlanError(
                f"deterministic=true and {name}={getattr(job, name)}: what is learned hangs on how many replicas there "
                "are",
                "leave one of them out",
            )
    if local and plan.cp > 1:
        raise PlanError(
            f"local_steps={job.local_steps} and cp={plan.cp}: a replica would sum gradients over the links that its "
            "attention goes round by",
            "leave one of them out; pp and tp go with local_steps",
        )
    if job.max_staleness and not served:
        raise PlanError(
            f"max_staleness is {job.max_staleness} and the plan has no servers",
            "give the plan servers=1, or leave it out",
        )
    if job.gradient_compression != "none" and (served or job.deterministic):
        raise PlanError(
            f"gradient_compression={job.gradient_compression} and {'servers' if served else 'deterministic=true'}: "
            f"{'gradients go to servers as they are' if served else 'what is lost hangs on how gradients are cut'}",
            "leave one of them out",
        )
