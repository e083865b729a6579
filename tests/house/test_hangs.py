"""The guards of tests/conftest.py: a hang shows every process's stack, a process left behind is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import FAILURES_VARIABLE
from tests.house.tree import ROOT

HANG = '''
import subprocess, sys
import pytest

CHILD = """
import sys, time
from tllm.core.stacks import show_stacks_on_signal
show_stacks_on_signal()
def wait_for_a_frame_that_never_comes():
    print("up", flush=True)
    time.sleep(50)
wait_for_a_frame_that_never_comes()
"""

@pytest.mark.timeout(3)
def test_hang():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.wait()
'''

LEAK = """
import subprocess

def test_leak():
    subprocess.run(["sh", "-c", "sleep 44 & exit 0"], check=True)
"""


def run_guarded(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_case.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(folder), "-p", "no:randomly"]
    command += ["-c", str(ROOT / "pyproject.toml"), str(folder / "test_case.py")]
    env = {name: value for name, value in os.environ.items() if name != FAILURES_VARIABLE}  # which are not of these
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=50)


def test_a_hang_prints_the_stacks_of_every_process(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, HANG)
    assert done.returncode == 1
    assert "test_hang has run for its limit of 3 s" in done.stdout
    assert "in test_hang" in done.stdout, "our own stack"
    assert "in wait_for_a_frame_that_never_comes" in done.stdout, "the child's stack"


def test_a_process_left_behind_fails_its_test(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, LEAK)
    assert done.returncode == 1
    assert "left 1 child processes" in done.stdout
    assert "sleep 44" in done.stdout
