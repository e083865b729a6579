"""Watch a running cluster in the terminal: machines, links, tokens over time, sequences in hand, what happened.

The page at the server's address shows the same in a browser. q or Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tllm.cli.arguments.running_cluster import add_running_cluster, fetch
from tllm.cli.display.live_screen import LiveHistory, live_screen
from tllm.core.errors import AuthError, ClusterError

SECONDS = 1.0
CANNOT_DRAW = ("dumb", "unknown")
"""Terminals to which nothing is drawn: they get the screen once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_running_cluster(parser)
    parser.add_argument("--once", action="store_true", help="print it once and end, for scripts and logs")


def run(args: argparse.Namespace) -> int:
    history = LiveHistory()
    text = _look(args, history)
    if args.once or not sys.stdout.isatty() or os.environ.get("TERM") in CANNOT_DRAW:
        print(text)
        return 0
    _watch(args, history, text)
    return 0


def _watch(args: argparse.Namespace, history: LiveHistory, text: str) -> None:
    """Draw the screen until q is pressed; after a Ctrl-Z it is the shell's, until `fg`."""
    while True:
        try:
            _draw(args, history, text)
            return
        except _Suspended:
            os.kill(os.getpid(), signal.SIGSTOP)


def _draw(args: argparse.Namespace, history: LiveHistory, text: str) -> None:
    """Draw the screen each second until q is pressed. A server that stops answering is said, and asked again."""
    from rich.live import Live
    from rich.text import Text

    with _suspends(), _keys() as pressed, Live(Text(text), screen=True, auto_refresh=False) as live:
        while not pressed(SECONDS):
            try:
                text = _look(args, history)
            except AuthError:
                raise
            except ClusterError as error:
                text = f"{error.message}; asked again at {time.strftime('%H:%M:%S')}"
            live.update(Text(text), refresh=True)


def _look(args: argparse.Namespace, history: LiveHistory) -> str:
    """Ask the server, and make the screen of what it says."""
    status = fetch(args)
    if not history.add(fetch(args, history.path)):
        history.add(fetch(args, history.path))
    return live_screen(status, history)


class _Suspended(Exception):
    """Ctrl-Z was pressed."""


@contextmanager
def _suspends() -> Iterator[None]:
    """In the block a Ctrl-Z raises `_Suspended`, so that the terminal is first given back as it was."""

    def suspend(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # once is enough
        raise _Suspended

    before = signal.getsignal(signal.SIGTSTP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds and says whether q was pressed meanwhile; without a keyboard it waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    def pressed(seconds: float) -> bool:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        # All that was typed, and not through a buffer, of which nobody is told that something is left in it.
        typed = os.read(sys.stdin.fileno(), 1024)
        return not typed or b"q" in typed.lower()

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
