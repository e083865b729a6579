"""Argument parsing as the rest of the house speaks: faults are errors with hints, and values say what they must be."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tllm.cli.arguments.elsewhere import said_of_option, said_of_value
from tllm.core.errors import ConfigError, nearest

MOST = (1 << 31) - 1
"""Of anything that is counted, and the largest token id: more does not fit into the numbers of the libraries below."""

MOST_BYTES = (1 << 63) - 1
UNITS = {"": 1, "B": 1} | {unit: 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
UNITS |= {f"{unit}B": 10 ** (3 * power) for power, unit in enumerate("KMGT", 1)}


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError`, and knows the option that a mistyped one was meant to be."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._words: list[str] = []

    def parse_args(  # type: ignore[override]  # its overloads say what it does with a namespace of one's own
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        self._words = list(args or ())  # what an unknown word stands behind is seen in them
        return super().parse_args(args, namespace)

    def format_help(self) -> str:
        """The help, with the paragraphs of the description as wide as the rest of it; examples stay as they are."""
        whole, width = self.description, max(20, shutil.get_terminal_size().columns - 2)
        assert whole is not None
        self.description = "\n\n".join(
            paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, width, break_on_hyphens=False)
            for paragraph in whole.split("\n\n")
        )
        try:
            return super().format_help()
        finally:
            self.description = whole

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            r"argument -h/--help: ignored explicit argument '(.*)'", r"unrecognized arguments: -h\1", message
        )
        unknown = re.search(r"unrecognized arguments: (\S*)", message)
        choice = re.search(r"argument (\S+): invalid choice: '(.*?)'", message)
        hint = self._help
        if unknown and unknown[1].startswith("-"):
            word = unknown[1].partition("=")[0]
            message, hint = f"{self.prog} has no option {word}", self._meant(word)
        elif unknown:
            message = f"{self.prog} does not know what {unknown[1]!r} is for"
            if option := self._repeatable_before(unknown[1]):
                hint = f"{option} takes one value: give it again for another; {hint}"
        elif choice and (action := self._option_string_actions.get(choice[1])):
            hint = said_of_value(action, choice[2], self._option_string_actions) or hint
        raise ConfigError(message, hint)

    def _repeatable_before(self, word: str) -> str | None:
        """The option that may come again, and whose one value stands before a word."""
        place = self._words.index(word) if word in self._words else 0
        for before in self._words[max(0, place - 2) : place]:
            option = before.partition("=")[0]
            if isinstance(self._option_string_actions.get(option), argparse._AppendAction):
                return option
        return None

    def _meant(self, word: str) -> str:
        """What an option that there is not was meant to be: mistyped, a key of the job, or one of another program."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        dashed = re.sub("^--?", "--", word.lower().replace("_", "-"))
        if dashed in known:
            return f"did you mean {dashed!r}?"
        metavars = ["=".join([*action.option_strings[-1:], str(action.metavar)]) for action in self._actions]
        has = [*known, *metavars]
        if said := said_of_option(word, has) or said_of_option(dashed, has):
            return said
        of_job = _said_of_key(dashed[2:].replace("-", "_")) if "JOB" in has else None
        return of_job or nearest(dashed, known, self._help)

    @property
    def _help(self) -> str:
        return f"`{self.prog} --help` lists its options"


def _said_of_key(name: str) -> str | None:
    from tllm.training.job.job_file import said_of_key  # which no command needs that is typed as it should be

    return said_of_key(name)


def option_of(name: str) -> str:
    """The option whose value the namespace has under this name."""
    return f"--{name.replace('_', '-')}"


def whole(text: str) -> int:
    """A whole number of 1 or more."""
    return _number(text, 1, MOST, "a whole number of 1 or more")


def count(text: str) -> int:
    """A whole number of 0 or more."""
    return _number(text, 0, MOST, "a whole number of 0 or more")


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a number above 0")
    return value


def port(text: str) -> int:
    """A port to listen on; 0 takes any free one."""
    return _number(text, 0, 65535, "a port from 0 to 65535")


def _number(text: str, least: int, most: int, what: str) -> int:
    """Decimal digits as a number from `least` to `most`, which `what` says in words."""
    if not text.isascii() or not text.isdigit() or int(text[:20]) < least:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not {what}")
    if len(text) > 20 or int(text) > most:
        upto = "" if str(most) in what else f", {most} at most"
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not {what}{upto}")
    return int(text)


def size(text: str) -> int:
    """Bytes: a number, or one with a unit (512M and 512MiB are 2^20 bytes each, 512MB are 10^6)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match[2].upper().replace("IB", "") if match else ""
    nbytes = float(match[1]) * UNITS.get(unit, 0) if match else 0.0
    if not 0 < nbytes <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a size such as 512MiB or 2GiB")
    return int(nbytes)


def user_path(text: str) -> Path:
    """A path in which `~` is a home, also where the shell has left it so, as in `--keep=~/plans`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # there is no such user
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is no path here: {str(error).rstrip('.')}") from error


def new_file(text: str) -> Path:
    """A file that may be written once the work for it is done: its folder is there, and it is none."""
    path = user_path(text)
    if os.path.isdir(path):  # which says no where a path has no right or no room in its system
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is a folder, and a file is to be written")
    if not os.path.isdir(path.absolute().parent):
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is in a folder that is not there")
    return path


def user_path_text(text: str) -> str:
    """The same as text, "" where none is given."""
    return str(user_path(text)) if text else ""


def nonempty(given: str) -> str:
    """Any text but an empty one."""
    if not given:
        raise argparse.ArgumentTypeError("an empty text is none: leave it out")
    return given


def token_ids(text: str) -> tuple[int, ...]:
    """Token ids joined by commas: 1,2,3."""
    return tuple(_number(part.strip(), 0, MOST, "a token id in a list such as 1,2,3") for part in text.split(","))


def address(text: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address stands in brackets."""
    from tllm.cluster.connection import parse_address  # with asyncio and ssl, which few options need

    try:
        return parse_address(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as in 192.168.1.10:8476") from error
