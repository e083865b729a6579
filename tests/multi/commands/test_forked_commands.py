"""Commands that are forked in place of being executed are to a test, and to a shell, what they would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.cluster.processes import command
from tests.support.commands import forked_command
from tests.support.commands.command_door import CommandDoor
from tests.support.commands.forked_command import SOURCE, ForkedCommand

WAITS = """
import os, sys, time
print(sys.argv[1:], os.getpgrp(), "torch" in sys.modules, flush=True)
time.sleep(60)
"""
STARTS_A_SERVER = """
import os, socket, subprocess, sys
mine, theirs = socket.socketpair()
words = [sys.executable, "-m", "tllm.node.fork_server", str(theirs.fileno())]
for _ in range(2):
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()], start_new_session=True, stderr=subprocess.PIPE)
    parent = open(f"/proc/{server.pid}/stat").read().rpartition(")")[2].split()[1]
    print(int(parent) == os.getpid(), os.getsid(server.pid) == server.pid, flush=True)
    server.kill()
    print(server.wait(), server.stderr.read())
"""
COUNTS = "import sys; print('torch' in sys.modules, sys.modules['torch'].get_num_threads())"
KILLS_ONE = """
import sys
from tests.support.commands.forked_command import ForkedCommand
with ForkedCommand([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
    print(process.poll())
    process.kill()
    print(process.wait())
"""


@pytest.fixture
def door() -> Iterator[CommandDoor]:
    with CommandDoor() as made:
        yield made


def shell(line: str, **environment: str) -> subprocess.Popen[str]:
    """A shell with a group of its own, in this session."""
    return subprocess.Popen(
        ["bash", "-c", line],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def test_it_is_listed_by_its_words_and_a_signal_ends_it() -> None:
    with ForkedCommand([sys.executable, "-c", WAITS, "one", "two"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"['one', 'two'] {os.getpgrp()} True\n"
        assert command(process.pid) == "python -c one two"
        process.terminate()
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    "variables",
    [{"OMP_NUM_THREADS": "3"}, {"PYTHONPATH": os.pathsep.join([SOURCE, SOURCE, os.environ.get("PYTHONPATH", "")])}],
)
def test_other_threads_and_where_our_modules_are_have_none_executed(variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    with ForkedCommand([sys.executable, "-c", COUNTS], stdout=subprocess.PIPE, text=True, env=environment) as process:
        said, _ = process.communicate()
    assert said == f"True {environment['OMP_NUM_THREADS']}\n"


def test_what_a_test_has_set_has_it_executed_also_by_the_first_that_starts_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server, which such a test starts, has not read what lies on the test's path."""
    server = cache(forked_command.command_server.__wrapped__)
    monkeypatch.setattr(forked_command, "command_server", server)
    (tmp_path / "sitecustomize.py").write_text("print('read', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ForkedCommand([sys.executable, "-c", "print('run')"], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    server().close()
    assert said.split() == ["read", "run"]


def test_a_program_that_adopts_nobody_itself_is_its_parent_too() -> None:
    """As a benchmark is, which once killed nobody so, and thought that it had."""
    done = subprocess.run([sys.executable, "-c", KILLS_ONE], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["None", str(-signal.SIGKILL)]


def test_a_fork_server_of_its_own_is_its_child_and_leads_a_session() -> None:
    """The first is the spare that waits beside it, the second is executed."""
    done = ForkedCommand([sys.executable, "-c", STARTS_A_SERVER], stdout=subprocess.PIPE, text=True)
    with done as process:
        said, _ = process.communicate()
    assert process.returncode == 0
    assert said.splitlines() == ["True True", f"{-signal.SIGKILL} b''"] * 2


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)])
def test_a_shell_has_its_words_and_its_code(ends: str, code: int, door: CommandDoor, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"import os, sys\nprint(*sys.argv[1:], os.environ['KEY'], os.getcwd(), flush=True)\n{ends}\n")
    with shell(f"cd {tmp_path}; {door.words} program.py 'a b' | cat; exit ${{PIPESTATUS[0]}}", KEY="value") as process:
        said, _ = process.communicate()
    assert said.splitlines()[0] == f"a b value {tmp_path}"
    assert process.returncode == code


def test_a_key_that_is_pressed_reaches_it(door: CommandDoor, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(WAITS)
    with shell(f"exec {door.words} {file}") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"[] {process.pid} True\n"
        os.killpg(process.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in process.stdout.read()
        assert process.wait() in (1, -signal.SIGINT)


def test_what_is_read_at_import_has_it_executed(door: CommandDoor, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint(sys.flags.hash_randomization, 'torch' in sys.modules)\n")
    with shell(f"exec {door.words} {file}", PYTHONHASHSEED="0") as process:
        said, _ = process.communicate()
    assert (said, process.returncode) == ("0 False\n", 0)
