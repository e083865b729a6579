"""What a newcomer reads: HOUSE.md lists the files of one request and of one training step, short enough to be read.

The lists are held to the lines that the files have, and to the code that runs: every file of a list takes part.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.house.tree import ROOT, SOURCE
from tests.support.models.families import save_model
from tests.support.training.runs import job_for, train
from tllm.engine.engine import Engine
from tllm.spec.request import SamplingParams

ROW = re.compile(r"^\| `(?P<file>[\w/]+\.py)` \| (?P<lines>\d+) \|", re.MULTILINE)
PATHS = {"One request": (8, 1500), "One training step": (10, 2000)}
"""Each path by the words that its list begins with, and its limits: files, and lines in all."""


def listed(title: str) -> dict[str, int]:
    """The files of a path and their lines, as HOUSE.md has them."""
    text = (ROOT / "HOUSE.md").read_text("utf-8")
    table = text[text.index(f"\n{title}") :].split("\n\n")[1]
    return {row["file"]: int(row["lines"]) for row in ROW.finditer(table)}


@contextmanager
def executed() -> Iterator[set[str]]:
    """Files of the package in which a function is called, in any thread that starts meanwhile."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]  # none, as it was


def run_request(folder: Path) -> None:
    with Engine.load(folder) as engine:
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))[0]) == 4


def run_training_step(folder: Path) -> None:
    job = job_for(folder, folder.parent / "run", max_steps=1, save_steps=1)
    train(job, "dp=2")


@pytest.mark.parametrize("title", PATHS)
def test_lines_are_those_of_the_files(title: str) -> None:
    files = listed(title)
    assert files, f"HOUSE.md has no list of {title}"
    counted = {name: len((SOURCE / name).read_text("utf-8").splitlines()) for name in files}
    assert files == counted, "HOUSE.md gives other lines than the files have"


@pytest.mark.parametrize("title", PATHS)
def test_a_path_can_be_read_in_one_sitting(title: str) -> None:
    most_files, most_lines = PATHS[title]
    files = listed(title)
    assert len(files) <= most_files
    assert sum(files.values()) <= most_lines


@pytest.mark.parametrize(("title", "run"), [("One request", run_request), ("One training step", run_training_step)])
def test_every_file_of_a_path_takes_part(title: str, run: Callable[[Path], None], tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    with executed() as files:
        run(tmp_path / "model")
    assert not set(listed(title)) - files, f"not executed: {sorted(set(listed(title)) - files)}"
