"""Rows that come from functions of the user's own, such as a dataset of Ray Data. They are written down once, where the
run begins.

The run's folder keeps them as a file of JSON lines, so that all that holds of files holds of them: each row has a
number, any order can be drawn over them, a run can go on at any row, and they are never in memory all at once. The
function is called in the process of `tllm train`, once in the life of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tllm.core.disk import whole_file
from tllm.core.errors import ConfigError
from tllm.training.job.job import Job
from tllm.training.job.job_parts import row_file
from tllm.training.tools.user_functions import UserFunction, UserModules, place_of, said


def keep_rows(job: Job) -> None:
    """Write what the functions in `train_files` and `eval_files` give into the run's folder, where it is not there yet.

    ConfigError where a function fails, gives what is no row, or has the name of another one.
    """
    kept, modules = dict[str, str](), UserModules()
    for name in dict.fromkeys((*job.train_files, *job.eval_files)):
        file = row_file(job, name)
        if file == name:
            continue
        if (other := kept.setdefault(file, name)) != name:
            raise ConfigError(f"{other} and {name} have one name", "give one of the functions another one")
        if not Path(file).exists():
            key = "train_files" if name in job.train_files else "eval_files"
            _write(modules.load(name, key), Path(file))


def _write(function: UserFunction, file: Path) -> None:
    encoder = msgspec.json.Encoder(enc_hook=_plain)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as out:
            for number, row in enumerate(_rows(function), 1):
                out.write(_line(row, number, function, encoder))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", "give another output_dir") from error


def _rows(function: UserFunction) -> Iterator[Any]:
    try:
        given = function.function()
        if hasattr(given, "iter_rows"):  # of Ray Data, whose blocks come in their order only where that is asked for
            given.context.execution_options.preserve_order = True
            given = given.iter_rows()
        yield from given
    except Exception as error:
        raise ConfigError(
            f"{function.name} of {function.file} raised {said(error)}",
            place_of(error, function.file) or function.file.name,
        ) from error


def _line(row: Any, number: int, function: UserFunction, encoder: msgspec.json.Encoder) -> bytes:
    """A row as JSON; columns without a value are left out, as of parquet files."""
    whose = f"row {number} of {function.name} of {function.file}"
    if not isinstance(row, Mapping):
        raise ConfigError(f"{whose} is of type {type(row).__name__}", 'a row is a dict, as {"text": "…"}')
    try:
        return encoder.encode({key: value for key, value in row.items() if not _is_missing(value)}) + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{whose} cannot be written as JSON: {error}", "give texts, numbers and lists") from error


def _is_missing(value: Any) -> bool:
    """None, or the NaN that pandas and Ray Data have in its place."""
    return value is None or (isinstance(value, float) and value != value)


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy, which Ray Data gives, as lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")
