"""Ctrl-C in the first moments of a command: no traceback, whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tllm

INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
WHILE_MODULES_LOAD = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "tllm.cli.main":
            {INTERRUPT}
sys.meta_path.insert(0, Finder())
"""
WHILE_PYTHON_STARTS_AGAIN = f"""
import os, signal
if "GOMP_SPINCOUNT" in os.environ:
    {INTERRUPT}
"""


def interrupted(folder: Path, moment: str, *words: str, is_ignored: bool = False) -> tuple[int, str, str]:
    """The exit code of a command and what it printed, with Ctrl-C at a moment: Python runs `moment` when it starts."""
    (folder / "sitecustomize.py").write_text(moment)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(Path(tllm.__file__).parents[1])))}
    environment.pop("GOMP_SPINCOUNT", None)
    environment.pop("OMP_WAIT_POLICY", None)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
    try:
        command = [sys.executable, "-m", "tllm", *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    return ended.returncode, ended.stdout, ended.stderr


def test_while_its_modules_load(tmp_path: Path) -> None:
    assert interrupted(tmp_path, WHILE_MODULES_LOAD, "models") == (130, "", "")
    code, _, errors = interrupted(tmp_path, WHILE_MODULES_LOAD, "models", "--debug")
    assert code and errors.endswith("KeyboardInterrupt\n")


def test_while_python_starts_again_with_another_environment(tmp_path: Path) -> None:
    """What was held back is heard as soon as the command can answer."""
    assert interrupted(tmp_path, WHILE_PYTHON_STARTS_AGAIN, "generate", "models/tiny") == (130, "", "")


@pytest.mark.parametrize("moment", [WHILE_MODULES_LOAD, WHILE_PYTHON_STARTS_AGAIN])
def test_where_it_is_ignored_it_stays_so(moment: str, tmp_path: Path) -> None:
    """As in the background of a script."""
    words = ("--version",) if moment is WHILE_MODULES_LOAD else ("generate", "--help")
    code, shown, errors = interrupted(tmp_path, moment, *words, is_ignored=True)
    assert (code, errors) == (0, "") and "tllm" in shown
