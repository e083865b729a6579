from __future__ import annotations

import argparse
import errno
import fcntl
import importlib
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import tllm
from tllm.cli import main as cli
from tllm.cli.arguments.parser import Parser
from tllm.core.errors import AuthError, ClusterError, NonFiniteError, PlanError, RequestError, TllmError, WeightsError
from tllm.kernels.autotune import VARIABLE, choice_file


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in cli.COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80, "a terminal would break it"


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """As git and ollama have it; it was the help of all commands, and no word of the one."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["help", "models"])
    assert ended.value.code == 0 and "usage: tllm models" in capsys.readouterr().out
    assert cli.main(["help", "modles"]) != 0
    assert "did you mean 'models'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "computes"), [(["serve"], True), (["--debug", "serve"], True), (["--debug", "plan"], False)]
)
def test_a_command_that_computes_is_begun_so_wherever_debug_stands(
    words: list[str], computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    monkeypatch.setattr(sys, "argv", ["tllm", *words, "--help"])
    monkeypatch.setattr(cli, "reexecute_to_compute", lambda: seen.append("begun again"))
    for name in ("end_on_hangup", "suspend_in_order", "show_stacks_on_signal"):
        monkeypatch.setattr(cli, name, lambda: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert bool(seen) is computes


def test_help_is_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80, name


def test_help_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of limits that were joined by commas were one word, wider than its column."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in cli.COMMANDS:
        parser = Parser(name, "A command.")
        importlib.import_module(cli.module_of(name)).add_arguments(parser)
        shown = set(re.split(r"[\s-]+", parser.format_help()))
        for action in parser._actions:
            if action.help and action.help != argparse.SUPPRESS:
                words = re.split(r"[\s-]+", parser._get_formatter()._expand_help(action))
                assert set(words) <= {"", *shown}, (name, action.option_strings)


def test_no_command_is_a_usage_error() -> None:
    assert cli.main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tllm {tllm.__version__}\n"


def test_python_runs_the_package() -> None:
    """In a process of its own, whose handlers of signals and of errors `main` may set."""
    source = str(Path(tllm.__file__).parents[1])
    words, environment = [sys.executable, "-m", "tllm", "--version"], os.environ | {"PYTHONPATH": source}
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=50, env=environment)
    assert ended.stdout == f"tllm {tllm.__version__}\n"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["plna"], "error: tllm has no command 'plna'", "did you mean 'plan'?"),
        (["--bogus"], "error: tllm has no option '--bogus'", "`tllm --help` lists the commands"),
        (["run", "."], "error: tllm has no command 'run'", "`tllm chat MODEL`"),
        (["plan"], "error: the following arguments are required: MODEL", "`tllm plan --help`"),
        (["plan", "/nowhere/at/all"], "error: /nowhere/at/all is not a folder", "config.json"),
        (["plan", ".", "--paln=pp=2"], "error: tllm plan has no option --paln", "did you mean '--plan'?"),
        (["plan", ".", "--page-size", "0"], "'0' is not a whole number of 1 or more", "`tllm plan --help`"),
    ],
)
def test_usage_errors(words: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, second = shown.err.splitlines()
    assert error in first
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.parametrize("words", [["models"], ["serve", "org/name"], ["generate", "ollama:name"]])
def test_a_user_without_a_home_is_told(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a service may have; it was called a fault of ours."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert cli.main(words) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["error: this user has no home folder", "hint: set HOME to a folder that this user may write"]
    monkeypatch.setenv(VARIABLE, "on")
    assert choice_file() is None, "what is measured is then not kept"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (TllmError("no"), 1),
        (PlanError("no"), 3),
        (ClusterError("no"), 4),
        (AuthError("no"), 5),
        (WeightsError("no"), 6),
        (NonFiniteError("no"), 7),
        (RequestError("the prompt is too long"), 2),
        (KeyboardInterrupt(), 130),
        (BaseExceptionGroup("together", [KeyError("x"), ExceptionGroup("deeper", [AuthError("no")])]), 5),
    ],
)
def test_exit_codes(raised: BaseException, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> None:
        raise raised

    monkeypatch.setattr("tllm.cli.commands.plan.engine_options", fail)
    assert cli.main(["plan", str(folder)]) == code


def test_debug_lets_the_traceback_through() -> None:
    with pytest.raises(TllmError):
        cli.main(["plan", "/nowhere/at/all", "--debug"])


def test_a_group_without_a_known_error_is_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> None:
        raise ExceptionGroup("together", [KeyError("x")])

    monkeypatch.setattr("tllm.cli.commands.plan.engine_options", fail)
    with pytest.raises(ExceptionGroup):
        cli.main(["plan", str(folder)])


def test_an_unforeseen_error_is_two_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    cli.main(["--version"])
    sys.excepthook(KeyError, KeyError("x"), None)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "error: a fault in tllm itself: KeyError: 'x'"
    assert "--debug" in shown[1]


def test_a_full_disk_behind_stdout_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["--version"]) == TllmError.exit_code
    assert capsys.readouterr().err.splitlines() == [
        "error: could not write: No space left on device",
        "hint: see that the disk has room, that of stdout too",
    ]


def test_a_failed_read_is_not_called_a_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/models/x/tokenizer.json")

    monkeypatch.setattr("tllm.cli.commands.plan.engine_options", fail)
    with open(tmp_path / "stdout", "w") as stdout:  # what is still to be written to it is given up
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["plan", str(folder)]) == TllmError.exit_code
    assert capsys.readouterr().err.splitlines() == [
        "error: could not read or write /models/x/tokenizer.json: Input/output error",
        "hint: see that the disk is sound, and that the terminal is still there",
    ]


@pytest.mark.parametrize("color", [False, True])
def test_color_only_on_a_terminal_that_wants_it(
    color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    cli.print_error(TllmError("no"))
    assert ("\x1b[31m" in capsys.readouterr().err) is color


def test_an_error_is_as_wide_as_the_terminal_that_it_is_shown_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with open(other, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("NO_COLOR", "1")
        cli.print_error(TllmError("one word after another " * 4))
        terminal.flush()
        lines = screen.read(1000).decode().splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 40


@pytest.fixture(autouse=True)
def own_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets the process's hook; the next test gets its own back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
