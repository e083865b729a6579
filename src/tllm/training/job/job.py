"""`Job`: everything that a training run is asked to do. Keys have the names of Hugging Face's trainer where it has
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec

from tllm.core.errors import ConfigError
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.key_limits import KeyLimits, check_task_tables
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.preference_tables import (
    PREFERENCE_TABLES,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    SimPOConfig,
)
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig, RolloutConfig

TASK_TABLES = (*PREFERENCE_TABLES, "grpo", "rejection", "distill")
"""Each table is of the task with its name."""

_REWARDS = 'below it reward_funcs = ["module:function"], which says what a completion is worth'
NEEDED_LINES = {
    "grpo": _REWARDS,
    "rejection": _REWARDS,
    "distill": "below it teacher_model_name_or_path or teachers, from whom the student learns",
}

AT_LEAST: dict[str, float] = {
    "max_steps": 1,
    "seq_len": 1,
    "global_batch_size": 1,
    "microbatch_size": 1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "num_decay_steps": 0,
    "num_cycles": 0,
    "min_lr_ratio": 0,
    "weight_decay": 0,
    "adam_beta1": 0,
    "adam_beta2": 0,
    "adam_epsilon": 0,
    "momentum": 0,
    "max_grad_norm": 0,
    "seed": 0,
    "save_steps": 1,
    "eval_steps": 1,
    "eval_num_prompts": 0,
    "eval_max_new_tokens": 1,
    "lm_eval_num_fewshot": 0,
    "lm_eval_limit": 0,
    "lm_eval_max_gen_toks": 0,
    "early_stopping_patience": 0,
    "early_stopping_threshold": 0,
    "save_total_limit": 2,
    "mirror_steps": 0,
    "powersgd_rank": 1,
    "local_steps": 1,
    "outer_learning_rate": 0,
    "outer_momentum": 0,
    "delay_steps": 0,
    "max_staleness": -1,
    "router_aux_loss_coef": 0,
    "neftune_noise_alpha": 0,
}
BELOW: dict[str, float] = {
    "adam_beta1": 1,
    "adam_beta2": 1,
    "momentum": 1,
    "outer_momentum": 1,
    "delay_steps": 2,
    "seed": 2**63,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "task": ("sft", "distill", "grpo", "rejection", *PREFERENCE_TABLES),
    "optimizer": ("adamw", "sgd"),
    "dtype": ("float32", "bfloat16", "float64"),
    "over_long": ("split", "truncate", "refuse"),
    "documents": ("blank_lines", "stream"),
    "gradient_compression": ("none", "bf16", "int8", "powersgd"),
}
HINTS = {
    "max_steps": "count steps: rows / global_batch_size are an epoch, fewer with packing",
    "save_total_limit": "one save is there if the other is torn: the older one goes when the newer one is whole",
}
LIMITS = KeyLimits(AT_LEAST, BELOW, CHOICES, HINTS)


@dataclass(frozen=True)
class Job:
    """The job. Paths are relative to where the command runs.

    It starts from the folder `model_name_or_path`, or from random weights: then `config_name` is needed. What each step
    of `lr_scheduler_type` does: see `training.job.lr_schedule`. `plan` and `deterministic` change where and how work is
    done, not what is learned. `router_aux_loss_coef` and the keys after it change what is learned, and are off
    unless asked for; all but the first two of these send less over slow links.
    """

    output_dir: str
    """Folder of the run: metrics, saves, the finished model (docs/guides/train.md lists what it holds)."""
    train_files: tuple[str, ...]
    """Files of training data: `.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet` or `.txt`; all but `.parquet`
    also with `.gz`. Or Python functions of your own, as `module:function`: `rows:training` is the function `training`
    of `rows.py` in the folder of the job's file, which returns a dataset of Ray Data or anything else that gives rows
    one by one."""
    max_steps: int
    """Optimizer steps of the whole run."""
    task: str = "sft"
    """What is learned from the data: "sft" (the next token of texts, completions and conversations), "dpo", "kto",
    "orpo" or "simpo" (to prefer one reply to another), "reward" (to score replies), "distill" (what a teacher says of
    each next token), "grpo" (rewards of sampled completions) or "rejection" (the best of them)."""
    model_name_or_path: str | None = None
    """Folder of a Hugging Face model, or its name (`ORG/NAME[@REVISION]`), from whose weights and tokenizer the run
    starts."""
    config_name: str | None = None
    """`config.json`, or its folder, of a model to train from random weights."""
    tokenizer_name: str | None = None
    """`tokenizer.json`, or its folder, for a model that starts from random weights; without it one is trained on
    the data."""
    seq_len: int = 512
    """Largest number of tokens in a row."""
    global_batch_size: int = 8
    """Rows of one step, over all ranks together."""
    microbatch_size: int = 1
    """Rows that one rank computes at once."""
    train_weights: tuple[float, ...] | None = None
    """One weight for each of `train_files`: their rows are mixed in proportion. Left out, each row comes once an
    epoch."""
    shuffle: bool = True
    """Take the rows in random order, drawn from `seed`; false: in the order of the files."""
    packing: bool = True
    """Place several documents side by side in one row, where they do not see each other; false: one document in a
    row."""
    over_long: str = "split"
    """A document longer than `seq_len`: "split" it over rows, "truncate" it, or "refuse" it with an error."""
    documents: str = "blank_lines"
    """What is one document of a text file: what stands between "blank_lines", or the whole file as one "stream"."""
    add_eos: bool = True
    """End each text and each completion with the end-of-sequence token."""
    optimizer: str = "adamw"
    """Rule that moves the weights: "adamw" or "sgd"."""
    learning_rate: float = 5e-5
    """Peak learning rate, which `lr_scheduler_type` multiplies by a factor for each step."""
    lr_scheduler_type: str = "linear"
    """Shape of the learning rate over the steps: "linear", "cosine", "constant", "constant_with_warmup" or
    "warmup_stable_decay"."""
    warmup_steps: int = 0
    """First steps, in which the learning rate rises. "constant" has none."""
    num_decay_steps: int = 0
    """Last steps, in which the learning rate of warmup_stable_decay falls along half a cosine wave."""
    num_cycles: float = 0.5
    """Waves of a cosine schedule; 0.5 goes from the peak down to the lowest rate once."""
    min_lr_ratio: float = 0.0
    """Lowest factor of the learning rate in cosine and warmup_stable_decay."""
    weight_decay: float = 0.0
    """Weight decay of matrices; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """Number added to AdamW's denominator."""
    momentum: float = 0.9
    """Momentum of sgd."""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient over all parameters, beyond which it is scaled down; 0: no clipping."""
    dtype: str = "float32"
    """Type of weights and computation: "float32", "bfloat16" (float32 weights are kept beside them), or "float64"."""
    seed: int = 42
    """Seed of random weights and of the order of rows."""
    save_steps: int = 500
    """Steps between two saves on disk."""
    save_total_limit: int = 2
    """Saves that are kept, the best one among them with `load_best_model_at_end`; older ones are deleted."""
    mirror_steps: int = 1
    """Steps between copies of each rank's state in another rank's memory, for when a node is lost; 0: no copies."""
    report_to: tuple[str, ...] = ()
    """Where metrics go besides `metrics.jsonl`: nothing (or ["none"]), or ["tensorboard"]."""
    plan: str = "pp=1"
    """Which rank computes what (docs/guides/train.md); `--plan` on the command line wins over it."""
    deterministic: bool = False
    """Keep every bit of the result the same under dp, pp, zero and every schedule, and for any number of threads.
    Log-probabilities of completions are then the same, to the bit, where they are sampled and where they are learned
    from (`grpo`)."""
    router_aux_loss_coef: float = 0.0
    """Coefficient of the load-balance loss of a mixture of experts (as in Switch Transformers)."""
    neftune_noise_alpha: float = 0.0
    """NEFTune (2310.05914): noise on the embeddings in training, uniform in ± this over the square root of (tokens of
    the document x hidden size); 0: none. 5 to 15 is usual."""
    gradient_compression: str = "none"
    """How gradients travel: "none" (exact), "bf16" (2 bytes), "int8" (about 1 byte, error feedback) or "powersgd"
    (low rank)."""
    powersgd_rank: int = 4
    """Columns and rows that powersgd sends of each matrix."""
    local_steps: int = 1
    """Steps that each replica takes on its own before one outer step of all of them (DiLoCo); 1: all steps are
    shared."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer step, with `local_steps` above 1."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step, with `local_steps` above 1."""
    delay_steps: int = 0
    """1: a step's gradients travel while the next step is computed, and are applied one step late; 0: at once."""
    max_staleness: int = 0
    """With `servers` in the plan: steps that a replica may be ahead of the slowest; -1: any number."""
    eval_files: tuple[str, ...] = ()
    """Files of rows held out, or functions, of the form of `train_files`: their loss and metrics are told every
    `eval_steps`, or for the tasks that sample completions their rewards."""
    eval_steps: int = 500
    """Steps between two evaluations of `eval_files`; there is one after the last step too."""
    eval_num_prompts: int = 0
    """Prompts of `eval_files` that each evaluation completes greedily, to be read in `eval_completions.jsonl`,
    TensorBoard and the page; 0: none."""
    eval_max_new_tokens: int = 128
    """Largest number of tokens in such a completion. A prompt may have as many as are left of `seq_len`."""
    lm_eval_tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness (`pip install "together-llm[eval]"`) that each evaluation runs with the weights
    that are trained; nothing: none."""
    lm_eval_num_fewshot: int | None = None
    """Examples before each question of these tasks; left out: as many as each task says."""
    lm_eval_limit: int = 0
    """Only the first so many documents of each task; 0: all."""
    lm_eval_include_path: str | None = None
    """Folder of task descriptions of your own (YAML), with what they name. Python that they name is run, on rank 0."""
    lm_eval_apply_chat_template: bool = False
    """Put questions by the model's chat template, examples as turns."""
    lm_eval_max_gen_toks: int = 0
    """Largest number of tokens that a task may generate, 256 for one that does not say; 0: tasks generate nothing, and
    no engine is kept for them."""
    early_stopping_patience: int = 0
    """Evaluations in a row without a gain after which the run ends; 0: it takes all its steps."""
    early_stopping_threshold: float = 0.0
    """What a gain must exceed to count for `early_stopping_patience`."""
    load_best_model_at_end: bool = False
    """Finish with the weights of the best save that was evaluated, which is one of the `save_total_limit`; false: with
    those of the last step. `save_steps` must then be a multiple of `eval_steps`."""
    metric_for_best_model: str | None = None
    """What evaluations are compared by: "loss", a metric of the task ("rewards/accuracies") or one of lm-eval's
    ("lm_eval/TASK/acc"). Left out: "loss", and "reward" for the tasks that sample completions."""
    greater_is_better: bool | None = None
    """Whether a greater `metric_for_best_model` is a gain; left out, it is for all but losses ("loss", "nll_loss"),
    perplexities and bits per byte."""
    dpo: DPOConfig | None = None
    """Direct preference optimization: keys of the task "dpo"."""
    kto: KTOConfig | None = None
    """Kahneman-Tversky optimization: keys of the task "kto"."""
    orpo: ORPOConfig | None = None
    """Odds-ratio preference optimization: keys of the task "orpo"."""
    simpo: SimPOConfig | None = None
    """Simple preference optimization: keys of the task "simpo"."""
    reward: RewardConfig | None = None
    """Reward models: keys of the task "reward"."""
    lora: LoraJob | None = None
    """Train an adapter beside the model, which stays as it is."""
    distill: DistillationKeys | None = None
    """The teacher of `task = "distill"`."""
    grpo: GRPOConfig | None = None
    rejection: RejectionConfig | None = None

    @property
    def rollouts(self) -> RolloutConfig | None:
        """How completions are sampled, where the task learns from some."""
        own = None if self.distill is None else self.distill.rollouts
        return {"grpo": self.grpo, "rejection": self.rejection, "distill": own}.get(self.task)

    def __post_init__(self) -> None:
        LIMITS.check(self)
        check_task_tables(self.task, {name: getattr(self, name) for name in TASK_TABLES}, NEEDED_LINES)
        for name in ("output_dir", "train_files"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty", f"give {name}")
        if (self.model_name_or_path is None) == (self.config_name is None):
            both = "neither is given" if self.config_name is None else "both are given"
            raise ConfigError(
                f"a run begins with model_name_or_path or with config_name, and {both}",
                "give model_name_or_path to go on with a model's weights, config_name to begin with random ones",
            )
        if self.tokenizer_name is not None and self.config_name is None:
            raise ConfigError(
                "tokenizer_name is given and model_name_or_path has its own tokenizer", "leave tokenizer_name out"
            )
        if self.train_weights is not None and len(self.train_weights) != len(self.train_files):
            raise ConfigError(
                f"there are {len(self.train_weights)} train_weights and {len(self.train_files)} train_files",
                "give one weight for each file",
            )


def encode_job(job: Job) -> str:
    """A job as JSON, as the cluster's settings carry it to every rank."""
    return msgspec.json.encode(job).decode()


_JOBS = msgspec.json.Decoder(Job)  # made once: two threads that make msgspec look into a dataclass at once can crash


@lru_cache(maxsize=4)
def decode_job(content: str) -> Job:
    """What `encode_job` made; the same object each time, as a process asks for the job of its run again and again."""
    return _JOBS.decode(content)
