"""Reads a job from its file, from `--set key=value` and from defaults, knowing where each value came from; and writes
it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from os import PathLike, fspath
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from tllm.core.errors import UNREADABLE_TOML, ConfigError, nearest, toml_fault
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import FUNCTION, RolloutConfig, located_function

HINTS: dict[str, Any] = get_type_hints(Job)
TABLES: dict[str, Any] = {name: kind for name, hint in HINTS.items() for kind in get_args(hint) if is_dataclass(kind)}
"""The keys that are tables of a job's file, `[lora]` say, and the class of each. A table that is not given is None."""

TYPES: dict[str, Any] = {
    **{name: hint for name, hint in HINTS.items() if name not in TABLES},
    **{f"{table}.{one.name}": get_type_hints(kind)[one.name] for table, kind in TABLES.items() for one in fields(kind)},
}
"""The type of each key by its name, `table.key` for one of a table."""

REQUIRED = tuple(field.name for field in fields(Job) if field.default is MISSING)
NOTATION = 'a line reads key = value; a text is in "quotes", true and false are in small letters'
EXAMPLES = {"plan": '"dp=2,pp=2"'}
ROW_FILES = ("train_files", "eval_files")
DEFAULT, SET, PLAN = "default", "--set", "--plan"

_SAID = (
    (
        "microbatch_size is what a rank computes at once, global_batch_size all of a step",
        "per_device_train_batch_size train_batch_size micro_batch_size auto_find_batch_size "
        "train_micro_batch_size_per_gpu",
    ),
    (
        "it follows from global_batch_size and microbatch_size",
        "gradient_accumulation_steps accumulate_grad_batches grad_accum*",
    ),
    ("global_batch_size counts the rows of a step over all ranks", "batch_size"),
    (
        "give max_steps: rows / global_batch_size are an epoch, fewer with packing",
        "num_train_epochs num_epochs epochs max_epochs max_steps_per_epoch",
    ),
    ("give max_steps", "steps max_train_steps total_steps num_steps max_iters train_iters"),
    ('give dtype = "bfloat16"', "bf16 fp16 tf32 torch_dtype *_full_eval pure_bf16 fp16_* precision mixed_precision"),
    ('give optimizer = "adamw" or "sgd"', "optim optim_args optim_target_modules adafactor"),
    ("give learning_rate", "lr"),
    ("give warmup_steps, a number of steps", "warmup_ratio"),
    ("give num_cycles, min_lr_ratio or num_decay_steps", "lr_scheduler_kwargs"),
    ("give min_lr_ratio, a part of learning_rate", "min_lr eta_min min_learning_rate cosine_min_lr_ratio"),
    ("give adam_beta1 and adam_beta2, adam_epsilon", "betas beta1 beta2 eps"),
    ("give lr_scheduler_type", "lr_scheduler lr_decay_style scheduler"),
    ("give output_dir", "out_dir save_dir checkpoint_dir checkpointer output"),
    (
        "give model_name_or_path, a folder or a name, or config_name to begin with random weights",
        "model model_path model_dir model_name model_id base_model pretrained_model_name_or_path",
    ),
    ("a model brings its tokenizer; tokenizer_name is for random weights", "tokenizer tokenizer_path"),
    (
        "the template is that of the model's folder",
        "chat_template* template prompt_template system_prompt eos_token pad_token special_tokens",
    ),
    ("code in a model's folder is never run: leave it out", "trust_remote_code"),
    (
        "give seq_len",
        "max_length max_seq_length block_size sequence_len model_max_length context_length ctx_len n_ctx cutoff_len",
    ),
    (
        "give train_files, a list",
        "train_file train_dataset dataset dataset_name dataset_dir datasets dataset_config* data data_path "
        "train_data train_path",
    ),
    (
        "give eval_files, a list",
        "validation_file val_files val_data eval_dataset dataset_test_split test_size val_set_size eval_split",
    ),
    ("give max_grad_norm", "clip_grad_norm gradient_clipping gradient_clip_val grad_clip"),
    ("give seed, which draws weights and the order of rows", "data_seed"),
    ("give deterministic", "full_determinism"),
    ("give packing", "sample_packing eval_packing"),
    (
        "packing fills rows by best fit, and their documents do not see each other",
        "packing_strategy padding_free pad_to_multiple_of group_by_length train_sampling_strategy length_column_name",
    ),
    ('give over_long = "truncate", which cuts ends off, or "refuse"', "truncation_mode"),
    ("a prompt and its reply have seq_len together", "max_prompt_length"),
    (
        "rank 0 reads and encodes rows while the step before is computed",
        "dataset_num_proc preprocessing_num_workers dataloader_*",
    ),
    (
        "other columns than those of a known form are passed over",
        "dataset_text_field dataset_kwargs remove_unused_columns label_names text_field text_column",
    ),
    (
        "of completions and conversations only what the model says is learned",
        "completion_only_loss assistant_only_loss train_on_inputs",
    ),
    ("a loss is the mean over all tokens that a step predicts", "average_tokens_across_devices"),
    ("next tokens have none; [dpo] and [simpo] have label_smoothing", "label_smoothing_factor"),
    (
        'metrics.jsonl has a line for each step; report_to = ["tensorboard"] writes them for TensorBoard too',
        "wandb* use_wandb tensorboard logger log_with metric_logger log_every_n_steps log_completions logging_* "
        "log_level* log_on_each_node disable_tqdm include_num_input_tokens_seen skip_memory_metrics",
    ),
    ("output_dir names the run", "run_name project trackio_*"),
    (
        "evaluations come every eval_steps where eval_files are given",
        "eval_strategy evaluation_strategy do_eval do_predict eval_delay eval_on_start "
        "val_check_interval evals_per_epoch eval_batch_size eval_accumulation_steps eval_do_concat_batches "
        "eval_use_gather_object batch_eval_metrics "
        "include_for_metrics per_device_eval_batch_size prediction_loss_only",
    ),
    (
        "saves come every save_steps, and hold all that a run needs to go on",
        "saves_per_epoch save_strategy save_only_model save_safetensors save_on_each_node enable_jit_checkpoint",
    ),
    (
        "the same command goes on from the last save",
        "resume resume_from_checkpoint restore_callback_states_from_checkpoint ignore_data_skip "
        "overwrite_output_dir do_train",
    ),
    ('give plan = "recompute=layer"', "gradient_checkpointing* *activation_checkpointing* recompute*"),
    ('give plan = "offload=host"', "activation_offloading *_activation_offloading cpu_offload *_cpu_offload"),
    (
        'plan says who computes what: "dp=2,zero=3"',
        "fsdp* deepspeed ds_config parallelism_config accelerator accelerator_config strategy ddp_* local_rank "
        "world_size "
        "devices zero zero_stage zero_optimization *_parallel_size *_parallel_dim *_parallel dp tp pp cp ep",
    ),
    ("give --device", "use_cpu no_cuda use_mps_device device device_map"),
    (
        "how products are computed is chosen by measuring",
        "compile torch_compile* torch_empty_cache_steps *liger_kernel* attn_implementation flash_attention use_cache",
    ),
    ("final/ is a Hugging Face folder, which `hf upload` takes", "push_to_hub hub_*"),
    ("write [lora]", "use_peft peft_config adapter finetuning_type"),
    ("write [lora], and r below it", "lora_r lora_rank"),
    ("write [lora], and target_modules below it", "lora_target lora_target_modules lora_target_linear"),
    ('write [lora], and quantize = "int4" below it', "load_in_4bit bnb_* quantization_bit bits"),
    ('write [lora], and quantize = "int8" below it', "load_in_8bit"),
    ("all that [lora] adapts has one rank and one lora_alpha: leave it out", "rank_pattern alpha_pattern"),
    (
        "an adapter is A and B of linears, and magnitudes with use_dora: leave it out",
        "*modules_to_save bias lora_bias trainable_token_indices",
    ),
    ("name the parts of experts in target_modules, such as down_proj or w2", "target_parameters"),
    ("layers_to_transform has the numbers of the model's layers: leave it out", "layers_pattern"),
    ('quantize = "int4" in [lora] rounds the model: leave it out', "loftq_config use_qalora"),
    ("the model says it: leave it out", "fan_in_fan_out task_type peft_type"),
    ("a reference is computed once, before the first step", "precompute_ref_log_probs ref_model* force_use_ref_model"),
    (
        "give --nodes N, machines, or --local N, processes here, to the command",
        "nnodes num_nodes nproc_per_node num_processes num_gpus",
    ),
    ("let `tllm serve` write the teacher's texts, and learn from these as data", "seq_kd"),
    ("there is none but lora_dropout below [lora]", "dropout attention_dropout disable_dropout"),
    (
        "give max_completion_length below the table of the task; eval_max_new_tokens is for completions to be read",
        "max_new_tokens max_tokens max_response_length response_length",
    ),
    ("completions are drawn by temperature, top_k and top_p below the table of the task", "min_p repetition_penalty"),
    ("give files that have just the rows to be read", "max_*_samples limit_*_batches split train_split"),
    (
        "all weights are trained, or with [lora] those of an adapter at target_modules",
        "freeze* unfreeze* trainable_*",
    ),
    ('give task, "dpo" say, and its table', "stage pref_loss rlhf rl"),
    ("write [distill], and teacher_model_name_or_path below it", "teacher_model"),
    ("write reward_model_name_or_path below the table of the task", "reward_model reward_model_path"),
    ("completions of a step are global_batch_size, of a prompt num_generations", "generation_batch_size"),
    ("num_iterations below [grpo] says how often completions are learned from", "steps_per_generation"),
    ("the same key begins with rollout_ here, not vllm_, below the table of the task", "vllm_importance_sampling_*"),
    ("write rollout_servers or rollout_nodes below the table of the task", "use_vllm vllm_*"),
    (
        "give beta below the table of the task, the weight of the divergence to the reference",
        "kl_coef init_kl_coef kl_loss_coef kl_penalty_coef kl_beta",
    ),
    (
        "give epsilon below [grpo], and epsilon_high where the upper bound is another",
        "clip_range cliprange clip_ratio clip_range_ratio",
    ),
    ("ratios are clipped at 1 - epsilon and 1 + epsilon_high alone: leave it out", "delta"),
    (
        "give num_generations below the table of the task",
        "n rollout_n group_size num_return_sequences num_samples best_of best_of_n",
    ),
    (
        "advantages are those of a completion's group, without a model of values: leave it out",
        "lam gae_lambda cliprange_value",
    ),
    (
        "the reference is the model that the run began with, and stays it: leave it out",
        "sync_ref_model ref_model_sync_steps",
    ),
    ("a job has one loss_type: leave it out", "loss_weights rpo_alpha f_divergence_type f_alpha_divergence_coef"),
    ("give lmbda below [distill], the share of steps that the student writes for", "on_policy"),
    ("give model_name_or_path above [distill]: it is the student", "student student_model student_model_name_or_path"),
    (
        "give beta below [distill]: 0 is the forward KL, 1 the reverse KL, between them lies JSD",
        "kl_divergence divergence kl_type",
    ),
    ("simpo_gamma below [simpo] is beta times this", "gamma_beta_ratio"),
    ("all that is learned has one learning_rate: leave it out", "loraplus* lora_plus"),
)
"""What stands here in the place of keys that people know from elsewhere; `*` is any end or beginning of one."""

ELSEWHERE = {key: hint for hint, keys in _SAID for key in keys.split()}


def _hint_for(key: str) -> str:
    """What a key that there is not was meant to be: one of another place or another trainer, or a mistyped one."""
    table, _, name = key.rpartition(".")
    if key.lower() in TABLES:
        return f"write [{key.lower()}], in small letters"
    if table and name in TYPES:
        return f"it is no key of a table: write it above [{table}]"
    if table and (longer := [known for known in TYPES if known.startswith(f"{table}.") and known.endswith(f"_{name}")]):
        return f"did you mean {' or '.join(repr(known.partition('.')[2]) for known in longer)}?"
    tables = [known.partition(".")[0] for known in TYPES if known.endswith(f".{name}")]
    if tables:
        return f"write it below {' or '.join(f'[{known}]' for known in tables)}"
    return _said(name) or nearest(key, TYPES, "`python -m pydoc tllm.training.job.job` lists the keys")


def _said(name: str) -> str | None:
    return next((hint for pattern, hint in ELSEWHERE.items() if fnmatchcase(name, pattern)), None)


def said_of_key(name: str) -> str | None:
    """What to do with an option of a command that has the name of a key, here or in another trainer; None for any other
    name."""
    keys = [name] if name in TYPES else [key for key in TYPES if key.endswith(f".{name}")]
    if keys:
        return (
            f"it is a key of the job: write it into its file, or give --set {' or '.join(f'{key}=…' for key in keys)}"
        )
    said = _said(name)
    return f"{said}; keys stand in the job's file, or behind --set" if said and "--" not in said else said


@dataclass(frozen=True)
class ResolvedJob:
    """A job, and for each key where its value came from: the file's name, `--set`, `--plan` or `default`.

    A key of a table is called `table.key`.
    """

    job: Job
    origins: dict[str, str]


def read_job(source: Path | Mapping[str, Any] | None, sets: Sequence[str] = (), plan: str | None = None) -> ResolvedJob:
    """A job from a TOML file or from the keys of a mapping; ConfigError says what is wrong and where.

    What comes later wins: `source`, `sets` (each "key=value") in their order, `plan`.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    name = source.name if isinstance(source, Path) else "the command" if source is None else "the job"
    keys = _read_toml(source) if isinstance(source, Path) else source or {}
    given = [(key, value, name) for key, value in keys.items()]
    given += [(*_pair(one), SET) for one in sets]
    if plan is not None:
        given.append(("plan", plan, PLAN))
    tables: dict[str, dict[str, Any]] = {}
    for key, value, origin in _flattened(given, tables):
        if key not in TYPES:
            is_table = isinstance(value, Mapping) and key.lower() not in TABLES
            hint = (
                "tables are those of tasks and [lora]; all other keys stand above them" if is_table else _hint_for(key)
            )
            raise ConfigError(f"{origin}: {key!r} is no key of a job", hint)
        table, _, name_in_table = key.rpartition(".")
        place = tables.setdefault(table, {}) if table else values
        place[name_in_table], origins[key] = _converted(key, value, origin), origin
    folder = source.parent if isinstance(source, Path) else Path()
    values |= {key: _located_rows(values[key], folder) for key in ROW_FILES if key in values}
    values |= {table: _located(TABLES[table](**keys), folder) for table, keys in tables.items()}
    missing = [key for key in REQUIRED if key not in values]
    if missing:
        hint = (
            "`tllm train JOB` reads them from a TOML file, --set KEY=VALUE gives one"
            if source is None
            else "a job cannot do without"
        )
        raise ConfigError(f"{name} does not give {', '.join(missing)}", hint)
    return ResolvedJob(Job(**values), {key: origins.get(key, DEFAULT) for key in TYPES})


def write_job(resolved: ResolvedJob) -> str:
    """The job as a file that `read_job` reads, every key in it, with where each came from."""
    job = resolved.job
    lines = [_line(name, getattr(job, name), resolved.origins[name]) for name in HINTS if name not in TABLES]
    for table, kind in TABLES.items():
        if (values := getattr(job, table)) is not None:
            lines.append(f"\n[{table}]\n")
            keys = [field.name for field in fields(kind)]
            lines += [_line(key, getattr(values, key), resolved.origins[f"{table}.{key}"]) for key in keys]
    return "".join(lines)


def _located(table: Any, folder: Path) -> Any:
    """A table whose files are named from the job's folder, by their paths; any other as it is."""
    return table.located(folder) if isinstance(table, RolloutConfig) else table


def _located_rows(names: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Files of rows as they are named, functions that give rows with the path of their file."""
    return tuple(located_function(name, folder) if FUNCTION.fullmatch(name) else name for name in names)


def _line(name: str, value: Any, origin: str) -> str:
    text = f"# {name} is not given" if value is None else f"{name} = {_toml(value)}"
    return f"{text}  # {origin}\n"


def _flattened(
    given: Sequence[tuple[str, Any, str]], tables: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Any, str]]:
    """The keys with those of tables as `table.key`. A table that is given, with no key even, is put into `tables`."""
    for key, value, origin in given:
        if key not in TABLES:
            yield key, value, origin
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{origin}: {key} = {value!r}: it is a table of keys", f"write [{key}] and its keys below it"
            )
        tables.setdefault(key, {})
        yield from ((f"{key}.{name}", one, origin) for name, one in value.items())


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the job {file}: {error.strerror}", "give the path of a TOML file") from error
    except UNREADABLE_TOML as error:
        hint = "a key is there twice" if "overwrite" in str(error) else NOTATION
        raise ConfigError(f"{file.name} is not TOML: {toml_fault(error)}", hint) from error


def _pair(text: str) -> tuple[str, Any]:
    """`key=value`; the value as in the file, where texts need no quotes and lists no brackets."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text!r} is not key=value", "for example --set learning_rate=3e-4")
    known = TYPES.get(key)
    if value == "none" and known is not None and type(None) in getattr(known, "__args__", ()):
        return key, None
    if _is_list(known) and not value.startswith("["):
        return key, [_plain(part.strip(), key) for part in value.split(",") if part.strip()]
    return key, _plain(value, key)


def _plain(value: str, key: str) -> Any:
    """A value as TOML reads it; a text as it stands where the key holds texts or TOML does not know it."""
    if value in ("true", "false") and "bool" in str(TYPES.get(key)):
        return value == "true"
    if _holds_text(TYPES.get(key)) and not value.startswith(('"', "'", "[")):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except UNREADABLE_TOML:
        return value


def _is_list(known: Any) -> bool:
    return "tuple" in str(known)


def _holds_text(known: Any) -> bool:
    return "str" in str(known)


def _converted(key: str, value: Any, origin: str) -> Any:
    if isinstance(value, list | tuple):
        value = [fspath(one) if isinstance(one, PathLike) else one for one in value]
    elif isinstance(value, PathLike):
        value = fspath(value)
    if _is_list(TYPES[key]) and isinstance(value, str | int | float):
        value = [value]  # one file, one weight
    try:
        return msgspec.convert(value, TYPES[key])
    except msgspec.ValidationError as error:
        why = str(error).split(" - at")[0]
        why = why[0].lower() + why[1:].replace("`", "").replace("array", "list")
        hint = f"write a text, as in {key} = {EXAMPLES[key]}" if key in EXAMPLES else ""
        if isinstance(value, float) and 0 < value < 1 and key.endswith("_steps"):
            hint = "give a number of steps: a part of max_steps is not read"
        elif isinstance(value, str) and not _holds_text(TYPES[key]):
            hint = "write true or false" if TYPES[key] is bool else "write a number"
            hint += "" if origin == SET else ", without quotes"
        raise ConfigError(f"{origin}: {key} = {value!r}: {why}", hint) from error


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
