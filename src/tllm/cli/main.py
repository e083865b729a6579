"""The `tllm` command: finds the subcommand, loads only its module, and turns errors into words and exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType

from tllm import __version__
from tllm.cli.arguments.elsewhere import COMMANDS_ELSEWHERE
from tllm.cli.arguments.parser import Parser
from tllm.cli.hangup import end_on_hangup
from tllm.cli.standard_streams import ready_streams
from tllm.core.errors import INTERRUPTED, ConfigError, RequestError, TllmError, nearest
from tllm.core.program import reexecute_to_compute
from tllm.core.stacks import show_stacks_on_signal
from tllm.node.machine.suspension import suspend_in_order

COMMANDS = {
    "generate": "continue one prompt and print the text",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model over HTTP, on this machine or over several",
    "train": "train a model: here, on several machines, or under torchrun or Slurm",
    "teach": "let a model teach students that are trained elsewhere",
    "rollout": "let a machine sample completions for runs elsewhere",
    "join": "give this machine to a cluster",
    "status": "show a running cluster: nodes, layers, memory, links",
    "top": "watch a running cluster: machines, tokens over time, what happens",
    "verify": "run a model split and unsplit, and say whether they are equal",
    "doctor": "look for what is wrong with machines and the network between them",
    "models": "list the models that are on this machine",
    "export": "write a model as a new folder, with adapters merged into it",
    "profile": "measure this machine, for plans",
    "plan": "show which rank would hold what, before anything is loaded",
    "simulate": "play a training step or serving on a cluster that is only described",
    "bench": "measure links and collectives beside what others use",
    "demo": "split the model that ships with tllm over three processes here",
}
PLACES = {
    "models": "folders",
    "export": "folders",
    "teach": "commands.post_training",
    "rollout": "commands.post_training",
}
"""Where the modules of commands are that are not in `tllm.cli.commands`."""

COMPUTE = {"generate", "chat", "serve", "train", "teach", "rollout", "join", "verify", "profile"}
"""Commands whose own process may run a model."""

PIPE_CLOSED = 141

NO_ROOM = ("write", "see that the disk has room, that of stdout too")
OUTSIDE_FAULTS = {
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EIO: ("read or write", "see that the disk is sound, and that the terminal is still there"),
}
"""What failed and what to do where a disk is full or broken, or a terminal gone: not a fault of ours, wherever it
shows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (docs/reference/exit-codes.md)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        if COMPUTE & set(_without_leading_debug(words)[:1]):
            reexecute_to_compute()
        ready_streams()
        end_on_hangup()
        suspend_in_order()
    debug = "--debug" in words
    if not debug:
        sys.excepthook = _print_unforeseen
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except (TllmError, BaseExceptionGroup) as error:
        known = error if isinstance(error, TllmError) else _first_known(error)
        if debug or known is None:
            raise
        print_error(known)
        return ConfigError.exit_code if isinstance(known, RequestError) else known.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()  # who read it went away
        return PIPE_CLOSED
    except OSError as error:
        if debug or error.errno not in OUTSIDE_FAULTS:
            raise
        _discard_output()
        done, hint = OUTSIDE_FAULTS[error.errno]
        where = f" {error.filename}" if error.filename else ""
        print_error(TllmError(f"could not {done}{where}: {error.strerror}", hint))
        return TllmError.exit_code


def _discard_output() -> None:
    """Give what is still to be written to stdout a place to go: Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def module_of(name: str) -> str:
    """The module of a command."""
    return f"tllm.cli.{PLACES.get(name, 'commands')}.{name}"


def print_error(error: TllmError) -> None:
    """One line of what and why, one of what to do, on stderr; on a terminal they end between words."""
    from tllm.cli.display.tables import wrapped

    width = _width() if sys.stderr.isatty() else None
    message = wrapped(f"error: {error.message}", width, "").removeprefix("error:")
    print(f"{_red('error:')}{message}", file=sys.stderr)
    if error.hint:
        print(wrapped(f"hint: {error.hint}", width, ""), file=sys.stderr)


def _width() -> int:
    """Columns of the terminal that stderr is: stdout may be a file, or another one."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or shutil.get_terminal_size().columns
    except (AttributeError, OSError):  # there is no such file, or it is no terminal
        return shutil.get_terminal_size().columns


def _run(words: list[str]) -> int:
    words = _without_leading_debug(words)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"tllm {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        hint = COMMANDS_ELSEWHERE.get(name) or nearest(name, COMMANDS, "`tllm --help` lists the commands")
        raise ConfigError(f"tllm has no {kind} {name!r}", hint)
    show_stacks_on_signal()
    command = importlib.import_module(module_of(name))
    parser = Parser(prog=f"tllm {name}", description=_description(command))
    parser.add_argument("--debug", action="store_true", help="show tracebacks and more of what happens")
    command.add_arguments(parser)
    run: Callable[[object], int] = command.run
    return run(parser.parse_args(words[1:]))


def _without_leading_debug(words: list[str]) -> list[str]:
    """The words from the command on: `--debug` may stand before it, too."""
    return [word for word in words if word != "--debug"] if words[:1] == ["--debug"] else words


def _first_known(group: BaseExceptionGroup[BaseException]) -> TllmError | None:
    """Tasks that ran together fail together: the first error meant for the user."""
    for error in group.exceptions:
        known = _first_known(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(known, TllmError):
            return known
    return None


def _description(command: ModuleType) -> str:
    assert command.__doc__ is not None
    return command.__doc__.strip()


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: tllm COMMAND …", "", "One language model over several ordinary machines.", "", "commands:"]
    lines += [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    lines += ["", "`tllm COMMAND --help` shows a command's options; `tllm --version` the version."]
    return "\n".join(lines)


def _print_unforeseen(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An error that nobody foresaw is ours, not the user's: say so in two lines."""
    print(f"{_red('error:')} a fault in tllm itself: {kind.__name__}: {error}", file=sys.stderr)
    print("hint: run it again with --debug and report what it prints", file=sys.stderr)


def _red(text: str) -> str:
    return f"\x1b[31m{text}\x1b[0m" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else text
