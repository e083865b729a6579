"""What a command logs: one line an event on stderr, so that a log of several machines can be read side by side."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Stderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment: while bars are shown, that puts lines above them."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


class BesideText(Stderr):
    """For a command that streams a text: where a terminal shows both, a line does not begin in the middle of it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout.isatty() and sys.stderr.isatty():
            sys.stderr.write("\n")
        super().emit(record)


def start_log(debug: bool, quiet: bool = False) -> None:
    """Info and above for a command that stays, warnings for one that ends by itself, everything with --debug."""
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    logging.basicConfig(handlers=[Stderr()], level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if not debug:
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def start_log_beside_text(debug: bool) -> None:
    """For a command that streams a text: warnings, in plain words; everything with --debug."""
    if debug:
        start_log(debug)
    else:
        logging.basicConfig(handlers=[BesideText()], level=logging.WARNING, format="%(message)s")


@contextmanager
def errors_alone(logger: str) -> Iterator[None]:
    """Within it a logger tells errors only: what else there is to tell of each thing, the command itself shows."""
    named = logging.getLogger(logger)
    before = named.level
    named.setLevel(logging.ERROR)
    try:
        yield
    finally:
        named.setLevel(before)
