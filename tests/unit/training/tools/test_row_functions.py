"""Functions that give rows: a run over them is a run over the same rows in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.training.job.job import Job
from tllm.training.job.job_file import read_job
from tllm.training.job.job_parts import data_config, eval_data_config
from tllm.training.tools.row_functions import keep_rows

MODULE = '''
import numpy as np
from types import SimpleNamespace

def training():
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    yield {"text": "one", "note": None}
    yield {"input_ids": np.arange(3), "weight": np.float32(0.5)}

class Dataset:
    """As Ray Data's: it gives its rows in order where it was asked to."""
    def __init__(self):
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))
    def iter_rows(self):
        rows = [{"text": "first"}, {"text": "second"}]
        return iter(rows if self.context.execution_options.preserve_order else rows[::-1])

def held_out():
    return Dataset()

def late():
    yield {"text": "good"}
    raise KeyError("gone")

def number():
    return [{"text": "good"}, 7]

def thing():
    return [{"text": object()}]
'''


def job_of(folder: Path, **keys: Any) -> Job:
    (folder / "rows.py").write_text(MODULE)
    lines = dict(output_dir=str(folder / "run"), max_steps=1, config_name="c", **keys)
    (folder / "job.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    return read_job(folder / "job.toml").job


def test_rows_are_written_once_in_their_order_and_read_as_files(tmp_path: Path) -> None:
    job = job_of(tmp_path, train_files=["plain.jsonl", "rows:training"], eval_files=["rows:held_out"])
    keep_rows(job)
    keep_rows(job)
    assert (tmp_path / "rows.py.calls").read_text() == "x", "called once for the life of the run"
    plain, training = data_config(job).files
    assert plain == "plain.jsonl"
    assert [json.loads(line) for line in Path(training).read_text().splitlines()] == [
        {"text": "one"},
        {"input_ids": [0, 1, 2], "weight": 0.5},
    ]
    (held_out,) = eval_data_config(job).files
    assert [json.loads(line)["text"] for line in Path(held_out).read_text().splitlines()] == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("late", r"late of .*rows\.py raised KeyError: 'gone'"),
        ("number", r"row 2 of number of .*rows\.py is of type int"),
        ("thing", r"row 1 of thing of .*rows\.py cannot be written as JSON: object is no value of JSON"),
        ("nobody", r"rows\.py has no function nobody"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_half_written_is_left(tmp_path: Path, name: str, words: str) -> None:
    job = job_of(tmp_path, train_files=[f"rows:{name}"])
    with pytest.raises(ConfigError, match=words):
        keep_rows(job)
    assert not list(tmp_path.glob("run/rows/*"))


def test_functions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.py").write_text(MODULE)
    job = job_of(tmp_path, train_files=["rows:held_out", "other/rows.py:held_out"])
    with pytest.raises(ConfigError, match="have one name"):
        keep_rows(job)
