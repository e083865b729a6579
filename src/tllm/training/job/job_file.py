"""A job from its file, from `--set key=value` and from defaults, each value with where it came from; and back again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from tllm.core.errors import ConfigError, nearest
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
ROW_FILES = ("train_files", "eval_files")
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
            raise ConfigError(f"{origin}: {key!r} is no key of a job", ELSEWHERE.get(key) or nearest(key, TYPES))
        table, _, name_in_table = key.rpartition(".")
        place = tables.setdefault(table, {}) if table else values
        place[name_in_table], origins[key] = _converted(key, value, origin), origin
    folder = source.parent if isinstance(source, Path) else Path()
    values |= {key: _located_rows(values[key], folder) for key in ROW_FILES if key in values}
    values |= {table: _located(TABLES[table](**keys), folder) for table, keys in tables.items()}
    missing = [key for key in REQUIRED if key not in values]
    if missing:
        raise ConfigError(f"{name} does not give {', '.join(missing)}", "a job cannot do without")
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
    if value in ("true", "false") and "bool" in str(TYPES.get(key)):
        return value == "true"
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
