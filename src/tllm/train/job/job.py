"""`Job`: all that a training run is asked to do, under the names that Hugging Face's trainer gave where it has one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import msgspec

from tllm.core.errors import ConfigError, nearest

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
    "save_total_limit": 2,
    "mirror_steps": 0,
    "powersgd_rank": 1,
    "local_steps": 1,
    "outer_learning_rate": 0,
    "outer_momentum": 0,
    "delay_steps": 0,
    "max_staleness": -1,
    "router_aux_loss_coef": 0,
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
    "optimizer": ("adamw", "sgd"),
    "dtype": ("float32", "bfloat16", "float64"),
    "over_long": ("split", "truncate", "refuse"),
    "documents": ("blank_lines", "stream"),
    "gradient_compression": ("none", "bf16", "int8", "powersgd"),
}


@dataclass(frozen=True)
class Job:
    """The job. Paths are relative to where the command runs.

    It starts from the folder `model_name_or_path`, or from nothing: then `config_name` is a config.json (or its folder)
    and `tokenizer_name` a tokenizer.json (or its folder), without which one is trained on the data.

    `global_batch_size` counts rows of at most `seq_len` tokens, of all ranks together; `microbatch_size` those that a
    rank computes at once. `max_grad_norm` 0 does not clip. `train_weights` mixes the files by rows. What each step of
    `lr_scheduler_type` does, and `num_decay_steps`, `num_cycles`, `min_lr_ratio`: see `train.job.lr_schedule`.

    Every `mirror_steps` steps a run that outlives its nodes copies each rank's state into another's memory, 0 never.
    `plan` changes where the work is done; `deterministic` lets that change no bit. What follows changes what is
    learned, and is off unless asked for: `router_aux_loss_coef` evens out the load of experts; `gradient_compression`,
    `local_steps` with `outer_learning_rate` and `outer_momentum`, and `delay_steps` send less over slow links;
    `max_staleness` is how many steps a replica may be ahead where the plan has servers, -1 any number.
    """

    output_dir: str
    train_files: tuple[str, ...]
    max_steps: int
    model_name_or_path: str | None = None
    config_name: str | None = None
    tokenizer_name: str | None = None
    seq_len: int = 512
    global_batch_size: int = 8
    microbatch_size: int = 1
    train_weights: tuple[float, ...] | None = None
    shuffle: bool = True
    packing: bool = True
    over_long: str = "split"
    documents: str = "blank_lines"
    add_eos: bool = True
    optimizer: str = "adamw"
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    num_decay_steps: int = 0
    num_cycles: float = 0.5
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    momentum: float = 0.9
    max_grad_norm: float = 1.0
    dtype: str = "float32"
    seed: int = 42
    save_steps: int = 500
    save_total_limit: int = 2
    mirror_steps: int = 1
    report_to: tuple[str, ...] = ()
    plan: str = "pp=1"
    deterministic: bool = False
    router_aux_loss_coef: float = 0.0
    gradient_compression: str = "none"
    powersgd_rank: int = 4
    local_steps: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    delay_steps: int = 0
    max_staleness: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))
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

    def _check(self, name: str, value: object) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} is {value}", "give a finite number")
        if isinstance(value, int | float):
            if name in AT_LEAST and value < AT_LEAST[name]:
                raise ConfigError(f"{name} is {value} and must be {AT_LEAST[name]} or more")
            if name in BELOW and value >= BELOW[name]:
                raise ConfigError(f"{name} is {value} and must be less than {BELOW[name]}")
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigError(f"{name} is {value!r}", nearest(str(value), CHOICES[name]))
        if name in ("output_dir", "train_files") and not value:
            raise ConfigError(f"{name} is empty", f"give {name}")


def encode_job(job: Job) -> str:
    """A job as JSON, as the cluster's settings carry it to every rank."""
    return msgspec.json.encode(job).decode()


@lru_cache(maxsize=4)
def decode_job(content: str) -> Job:
    """What `encode_job` made; the same object each time, as a process asks for the job of its run again and again."""
    return msgspec.json.decode(content, type=Job)
