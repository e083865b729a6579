"""The reader's terminals: runs the blocks of a page on machines a, b and c, and holds what they print to the page.

All machines are this one: each is a folder, and either a process on loopback or, with `Hosts`, a host of its own. What
is printed is compared line by line, in order; `…` stands for anything, and a number for any number unless it is
`exact`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from tests.docs.page import Block, Key, read
from tests.house.tree import ROOT
from tests.support.cluster.hosts import Hosts
from tests.support.commands.ask_at_door import HOST
from tests.support.commands.command_door import CommandDoor
from tllm.recipes.bench.processes import free_row

SECONDS_FOR_A_LINE = 240
SECONDS_TO_END = 60
DEFAULT_PORT = 8000
NUMBER = r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?"
INVITATION = re.compile(r"tllm (?:join|doctor) (\S+:\d+ --token \S+)")
SHORTENED = re.compile(r"\S+:\d+ --token \S*…")
SIGNALS = {"Ctrl-C": signal.SIGINT, "Ctrl-Z": signal.SIGSTOP, "fg": signal.SIGCONT}

COMMAND = """\
#!/bin/sh
# The tllm of this checkout. The port of the page may be taken here, and this machine may have no network but loopback.
case "$1" in serve | status) set -- "$@" --port {port} ;; esac
case " $* " in *" --nodes "*) set -- "$@" --cluster-host {host} ;; esac
exec {python} tllm.cli "$@"
"""

PYTHON = """\
#!/bin/sh
case "$1" in *.py) exec {file} "$@" ;; esac
exec {python} "$@"
"""

COPY = """\
#!/bin/sh
# scp between the folders that stand for machines: a:FILE is FILE of machine a.
for word do
    shift
    case "$word" in [abc]:*) word="../${word%%:*}/${word#*:}" ;; esac
    set -- "$@" "$word"
done
exec cp "$@"
"""


class Staying:
    """A command that was left running, and what it has printed so far. The first machine's ends those of the others."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.printed = ""
        self.seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, wanted: list[re.Pattern[str]]) -> None:
        """Wait until it has printed these lines since the last call."""
        end = time.monotonic() + SECONDS_FOR_A_LINE
        ended = False
        while not ended and time.monotonic() < end:
            ended = not self._reader.is_alive()
            place = find(wanted, self.printed, self.seen)
            if place is not None:
                self.seen = place
                return
            time.sleep(0.05)
        raise AssertionError(f"this was printed, and not what the page shows:\n{self.printed[self.seen :]}")

    def press(self, key: str) -> None:
        """Send a key's signal to the command and its children, as a terminal does."""
        os.killpg(self.process.pid, SIGNALS[key])
        if key == "Ctrl-C":
            self.process.wait(SECONDS_FOR_A_LINE)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._reader.join(SECONDS_TO_END)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.printed += line


class Terminals:
    """Machines a, b and c below `folder`. Used in a `with`, which ends every command that still runs.

    With a `door`, `tllm` and programs in files are forked there; else they are executed, which takes seconds more.
    """

    def __init__(self, folder: Path, hosts: Hosts | None = None, door: CommandDoor | None = None) -> None:
        self.folder, self.hosts = folder, hosts
        self.port = free_row(1)
        self.staying: dict[str, list[Staying]] = {}
        self.last: dict[str, str | Staying] = {}
        host = "127.0.0.1" if hosts is None else hosts.addresses[0]
        programs = folder / "bin"
        programs.mkdir()
        python = f"{sys.executable} -m" if door is None else door.words
        (programs / "tllm").write_text(COMMAND.format(port=self.port, host=host, python=python))
        (programs / "scp").write_text(COPY)
        file = sys.executable if door is None else door.words
        (programs / "python").write_text(PYTHON.format(python=sys.executable, file=file))
        for program in programs.iterdir():
            program.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
            "NO_COLOR": "1",
        }

    def __enter__(self) -> Terminals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for commands in self.staying.values():
            for command in commands:
                command.end()

    def follow(self, step: Block | Key) -> None:
        """Do what one block, or one key, of the page asks for."""
        if isinstance(step, Key):
            self.staying[step.machine][-1].press(step.name)
        elif "shown" in step.words:
            pass
        elif "file" in step.words:
            file = self._home(step.machine) / step.words["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._adapted(step.text), "utf-8")
        elif step.language == "bash":
            self._run(step)
        elif step.language == "text":
            self._compare(step)
        else:
            raise AssertionError(f"nothing is said of what to do with this block of {step.language or 'no language'}")

    def _run(self, block: Block) -> None:
        process = self._start(block)
        if "stays" in block.words:
            command = Staying(process)
            self.staying.setdefault(block.machine, []).append(command)
            self.last[block.machine] = command
        else:
            printed, _ = process.communicate()
            self.last[block.machine] = printed
            code = int(block.words.get("exit", "0"))
            assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{printed}"

    def _start(self, block: Block) -> subprocess.Popen[str]:
        script = "set -eo pipefail\n" + self._adapted(block.text)
        words, environment = ["bash", "-c", script], self.environment
        if self.hosts is not None:
            host = "abc".index(block.machine)
            words, environment = self.hosts.command(host, *words), environment | {HOST: self.hosts.names[host]}
        return subprocess.Popen(
            words,
            cwd=self._home(block.machine),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def _compare(self, block: Block) -> None:
        wanted = expected(block.text, exact="exact" in block.words)
        printed = self.staying[block.machine][-1] if "later" in block.words else self.last[block.machine]
        if isinstance(printed, Staying):
            printed.wait_for(wanted)
        else:
            assert find(wanted, printed) is not None, f"this was printed, and not what the page shows:\n{printed}"

    def _home(self, machine: str) -> Path:
        """The machine's working folder: as a checkout of this repository, with the model that ships with it."""
        home = self.folder / machine
        if not home.exists():
            home.mkdir()
            (home / "models").symlink_to(ROOT / "models")
        return home

    def _adapted(self, text: str) -> str:
        """A block with this test's port, and with the invitation that was printed where the page shortens one."""
        text = text.replace(f"127.0.0.1:{DEFAULT_PORT}", f"127.0.0.1:{self.port}")
        if SHORTENED.search(text):
            printed = "".join(command.printed for commands in self.staying.values() for command in commands)
            text = SHORTENED.sub(INVITATION.findall(printed)[-1], text)
        return text


def expected(text: str, *, exact: bool) -> list[re.Pattern[str]]:
    """A pattern for each line of a block that says something."""
    return [_line(line, exact) for line in text.splitlines() if line.strip(" …")]


def find(wanted: list[re.Pattern[str]], printed: str, start: int = 0) -> int | None:
    """Where what was printed ends to hold all these lines, in this order and with any others between; None if it does
    not."""
    place = start
    rest = iter(printed[start:].splitlines(keepends=True))
    for pattern in wanted:
        for line in rest:
            place += len(line)
            if pattern.search(line):
                break
        else:
            return None
    return place


def _line(text: str, exact: bool) -> re.Pattern[str]:
    return re.compile(r"[ \t]*".join(_word(word, exact) for word in text.split()))


def _word(text: str, exact: bool) -> str:
    return "".join(_part(part, exact) for part in re.split(f"(…|{NUMBER})", text))


def _part(part: str, exact: bool) -> str:
    if part == "…":
        return ".*?"
    return NUMBER if not exact and re.fullmatch(NUMBER, part) else re.escape(part)


def follow(path: Path, folder: Path, network: Hosts | None = None, door: CommandDoor | None = None) -> int:
    """Follow a page to its end; how many blocks were run."""
    steps = read(path)
    with Terminals(folder, network, door) as terminals:
        for step in steps:
            try:
                terminals.follow(step)
            except AssertionError as error:
                raise AssertionError(f"{path.relative_to(ROOT)}:{step.line}: {error}") from error
    return sum(isinstance(step, Block) and step.language == "bash" and "shown" not in step.words for step in steps)
