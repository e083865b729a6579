"""A job from its file, from `--set key=value` and from defaults, each value with where it came from; and back again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from tllm.core.errors import ConfigError, nearest
from tllm.training.job.job import Job

TYPES: dict[str, Any] = get_type_hints(Job)
REQUIRED = tuple(field.name for field in fields(Job) if field.default is MISSING)
DEFAULT, SET, PLAN = "default", "--set", "--plan"

ELSEWHERE = {
    "per_device_train_batch_size": "microbatch_size is what a rank computes at once, global_batch_size all of a step",
    "gradient_accumulation_steps": "it follows from global_batch_size and microbatch_size",
    "batch_size": "global_batch_size counts the rows of a step over all ranks",
    "num_train_epochs": "give max_steps",
    "epochs": "give max_steps",
    "steps": "give max_steps",
    "bf16": 'give dtype = "bfloat16"',
    "fp16": 'give dtype = "bfloat16"',
    "optim": 'give optimizer = "adamw" or "sgd"',
    "lr": "give learning_rate",
    "warmup_ratio": "give warmup_steps",
    "max_length": "give seq_len",
    "max_seq_length": "give seq_len",
    "block_size": "give seq_len",
    "train_file": "give train_files, a list",
    "clip_grad_norm": "give max_grad_norm",
}
"""Keys that people know from elsewhere, and what stands here in their place."""


@dataclass(frozen=True)
class ResolvedJob:
    """A job, and for each key where its value came from: the file's name, `--set`, `--plan` or `default`."""

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
    for key, value, origin in given:
        if key not in TYPES:
            raise ConfigError(f"{origin}: {key!r} is no key of a job", ELSEWHERE.get(key) or nearest(key, TYPES))
        values[key], origins[key] = _converted(key, value, origin), origin
    missing = [key for key in REQUIRED if key not in values]
    if missing:
        raise ConfigError(f"{name} does not give {', '.join(missing)}", "a job cannot do without")
    return ResolvedJob(Job(**values), {key: origins.get(key, DEFAULT) for key in TYPES})


def write_job(resolved: ResolvedJob) -> str:
    """The job as a file that `read_job` reads, every key in it, with where each came from."""
    lines = []
    for name in TYPES:
        value = getattr(resolved.job, name)
        text = f"# {name} is not given" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{text}  # {resolved.origins[name]}\n")
    return "".join(lines)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the job {file}: {error.strerror}", "give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file.name} is not TOML: {error}", 'a line reads key = value, a text is in "quotes"'
        ) from error


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
    if _holds_text(TYPES.get(key)) and not value.startswith(('"', "'", "[")):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _is_list(known: Any) -> bool:
    return "tuple" in str(known)


def _holds_text(known: Any) -> bool:
    return "str" in str(known)


def _converted(key: str, value: Any, origin: str) -> Any:
    if _is_list(TYPES[key]) and isinstance(value, str | int | float):
        value = [value]  # one file, one weight
    try:
        return msgspec.convert(value, TYPES[key])
    except msgspec.ValidationError as error:
        why = str(error).split(" - at")[0]
        why = why[0].lower() + why[1:].replace("`", "").replace("array", "list")
        raise ConfigError(f"{origin}: {key} = {value!r}: {why}") from error


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
