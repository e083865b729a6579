"""The guards of tests/conftest.py: a hang shows every process's stack, whoever leaves something behind is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FAILURES_VARIABLE
from tests.house.tree import ROOT
from tests.support import processor_rate

pytestmark = pytest.mark.timeout(240)  # a few seconds where nothing else runs

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

child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
child.stdout.readline()

@pytest.mark.timeout(1)
def test_hang():
    with child:
        child.wait()
'''
"""The child has begun to wait before the test's time begins."""

IN_C = """
import signal, time
import pytest
import tests.conftest

tests.conftest.SECONDS_TO_END = 3  # by when the test has begun
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])

@pytest.mark.timeout(1)
def test_in_c():
    time.sleep(40)  # which no other thread's signal ends
"""

LEAK = """
import functools, subprocess
from tests import conftest

conftest.wait_until_gone = functools.partial(conftest.wait_until_gone, seconds=0.5)

def test_leak():
    subprocess.run(["sh", "-c", "sleep 44 & exit 0"], check=True)
"""

CHANGES = """
import logging, os, signal, socket, sys
import pytest
import torch


@pytest.fixture(scope="module")
def wider():
    os.environ["WIDER"] = "1"
    yield
    del os.environ["WIDER"]

def test_nothing(wider, monkeypatch, caplog):
    caplog.set_level("DEBUG", "tllm.node")
    monkeypatch.setenv("A_VARIABLE", "1")
    monkeypatch.chdir("/")

def test_command(own_process):
    os.environ["A_VARIABLE"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.excepthook = print
    torch.set_num_threads(7)
    logging.getLogger("asyncio").setLevel("ERROR")

def test_signal():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def test_logger():
    logging.getLogger("tllm.node").setLevel("ERROR")

def test_variable(wider):
    os.environ["A_VARIABLE"] = "1"

def test_path():
    sys.path.insert(0, "/somewhere")

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_grad():
    torch.set_grad_enabled(False)

def test_cycle():
    loop = [socket.socket()]
    loop.append(loop)

def test_after(wider):
    assert "/somewhere" not in sys.path

def test_folder():
    os.chdir("/")
"""

CHANGED = {
    "test_signal": "the handler of SIGTERM was <Handlers.SIG_DFL: 0>, is <Handlers.SIG_IGN: 1>",
    "test_logger": "the logger 'tllm.node' was (0, (), True, False), is (40, (), True, False)",
    "test_variable": "os.environ['A_VARIABLE'] was None, is '1'",
    "test_folder": "the working folder was ",
    "test_dtype": "torch's default dtype was torch.float32, is torch.float64",
    "test_grad": "torch's grad mode was True, is False",
    "test_cycle": "unclosed <socket.socket ",
}

IMPORTS = """
def test_import():
    import torch
"""

SLOW = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.slow
@pytest.mark.soak
def test_soak():
    pass
"""

SEEDS = """
import pytest
import torch

SEEN = set()

@pytest.mark.parametrize("count", [1, 2])
def test_seen(count):
    SEEN.add(torch.rand(9).sum().item())
    assert len(SEEN) == 1
"""


def run_guarded(
    folder: Path, text: str, *words: str, failures: Path | None = None, rate: str = "1"
) -> subprocess.CompletedProcess[str]:
    """A run of pytest of its own, with more words on its command line; `failures` is to get a line for each failure,
    `rate` is the processor's slowness."""
    (folder / "test_case.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(folder), "-p", "no:randomly"]
    command += ["-c", str(ROOT / "pyproject.toml"), *words, str(folder)]
    outer = {FAILURES_VARIABLE, "PYTEST_XDIST_WORKER"}  # of the run that this test is in
    env = {name: value for name, value in os.environ.items() if name not in outer} | {processor_rate.VARIABLE: rate}
    if failures is not None:
        env[FAILURES_VARIABLE] = str(failures)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=200)


def test_a_hang_prints_the_stacks_of_every_process(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, HANG)
    assert done.returncode == 1
    assert "test_hang has run for its limit of 1 s" in done.stdout
    assert "in test_hang" in done.stdout, "our own stack"
    assert "in wait_for_a_frame_that_never_comes" in done.stdout, "the child's stack"


def test_a_limit_is_longer_on_a_slower_processor(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, HANG, rate="2.5")
    assert done.returncode == 1
    assert "test_hang has run for its limit of 2.5 s" in done.stdout


@pytest.mark.parametrize(
    ("rate", "words", "ran"), [("2.9", [], 3), ("3", [], 2), ("3", ["--everything"], 3), ("3", ["-m", "soak"], 1)]
)
def test_a_slow_processor_leaves_out_what_is_marked_slow(rate: str, words: list[str], ran: int, tmp_path: Path) -> None:
    done = run_guarded(tmp_path, SLOW, *words, rate=rate)
    assert done.returncode == 0 and f"{ran} passed" in done.stdout
    is_told = "takes 3.0 times as long as a usual one: tests that are marked slow were left out" in done.stdout
    assert is_told == (rate == "3" and words != ["--everything"])


def test_a_file_that_is_named_is_run_whole(tmp_path: Path) -> None:
    (tmp_path / "test_named.py").write_text(SLOW)
    done = run_guarded(tmp_path, SLOW, str(tmp_path / "test_named.py"), rate="3")
    assert "6 passed" in done.stdout


def test_a_run_that_nothing_interrupts_ends_with_the_name_of_its_test(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, IN_C, failures=(failures := tmp_path / "failures.txt"))
    assert done.returncode == 70
    assert "in test_in_c" in done.stderr, "our own stack, though pytest captures what tests print"
    assert failures.read_text().endswith("test_case.py::test_in_c cannot be interrupted; the run ends here\n")


def test_a_process_left_behind_fails_its_test(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, LEAK)
    assert done.returncode == 1
    assert "left 1 child processes" in done.stdout
    assert "sleep 44" in done.stdout


def test_what_a_test_leaves_changed_in_its_process_fails_it_by_name(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, CHANGES)
    failed = {line.split()[1].rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert failed == set(CHANGED), done.stdout
    for test, line in CHANGED.items():
        told = done.stdout.partition(f"ERROR at teardown of {test} _")[2].partition("\n____")[0]
        assert line in told, test


def test_what_a_library_brings_when_it_is_imported_is_no_change(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, IMPORTS)
    assert done.returncode == 0, done.stdout


def test_random_numbers_of_torch_begin_anew_for_each_test(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, SEEDS)
    assert done.returncode == 0, done.stdout
