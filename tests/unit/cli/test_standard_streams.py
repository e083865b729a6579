"""Commands whose stdout has few letters, or whose streams are closed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.house.tree import ROOT

TLLM = [sys.executable, "-m", "tllm.cli"]


def test_what_stdout_has_no_letter_for_is_an_escape() -> None:
    """An ellipsis is in no Latin-1: `tllm --help` ended in a fault of ours there."""
    said = subprocess.run(
        [*TLLM, "--help"], env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, cwd=ROOT
    )
    assert (said.returncode, said.stderr) == (0, b"")
    assert said.stdout.startswith(b"usage: tllm COMMAND \\u2026\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("nosuch", 2)])
def test_streams_that_are_closed_end_no_command(words: str, code: int, closed: str) -> None:
    line = f'"$0" -m tllm.cli {words} {closed}'
    said = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, cwd=ROOT)
    assert said.returncode == code
    assert b"a fault in tllm" not in said.stderr
