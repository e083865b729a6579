"""Progress on stderr: a bar on a terminal, else one line every few seconds. What is not bytes is counted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from tllm.core.memory import amount
from tllm.node.coordinator.cluster_options import COUNTED
from tllm.node.machine.suspension import following_suspension

if TYPE_CHECKING:
    from rich.live import Live

SECONDS_BETWEEN_LINES = 5.0

T = TypeVar("T")


class ShowProgress(Protocol):
    """Told how far a thing is: so many of so many bytes, or of what is counted (`COUNTED`)."""

    def __call__(self, title: str, done: int, total: int) -> None: ...


@contextmanager
def progress(quiet: bool = False) -> Iterator[ShowProgress]:
    """The form of progress that suits where stderr goes."""
    if quiet:
        yield lambda title, done, total: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bars() as bars:
            yield bars
    else:
        yield Lines()


@asynccontextmanager
async def loading(quiet: bool, opening: Callable[[ShowProgress], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """What `opening` opens, its progress shown until all is loaded; then the terminal is the command's again."""
    with ExitStack() as shown:
        async with opening(shown.enter_context(progress(quiet))) as opened:
            shown.close()
            yield opened


class Lines:
    """A line now and then, for logs: the first news after a few seconds, the end only of what was spoken of."""

    def __init__(self) -> None:
        self._start: dict[str, float] = {}
        self._spoke: dict[str, float] = {}

    def __call__(self, title: str, done: int, total: int) -> None:
        now = time.monotonic()
        start = self._start.setdefault(title, now)
        last = self._spoke.get(title, start)
        finished = done >= total and title in self._spoke
        if finished or (done < total and now - last >= SECONDS_BETWEEN_LINES):
            print(f"{title}: {_so_far(title, done, total)}", file=sys.stderr, flush=True)
            self._spoke[title] = now
        if done >= total:
            self._start.pop(title, None)
            self._spoke.pop(title, None)


def _so_far(title: str, done: int, total: int) -> str:
    return f"{done} of {total}" if title in COUNTED else f"{amount(done)} of {amount(total)}"


@contextmanager
def _bars() -> Iterator[ShowProgress]:
    from rich.console import Console  # 40 ms that only a terminal pays
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class SoFar(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = f", {amount(task.speed)}/s" if task.speed and task.description not in COUNTED else ""
            return Text(_so_far(task.description, int(task.completed), int(task.total or 0)) + speed)

    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")) or None)
    bars = Bars(TextColumn("{task.description}"), BarColumn(), SoFar(), console=console, transient=True)
    tasks = {}
    is_over = False

    def tell(title: str, done: int, total: int) -> None:
        if is_over:  # what comes late would show the bars anew, and nothing take them away
            return
        bars.start()  # with the first news, not while nodes are waited for
        if title not in tasks:
            tasks[title] = bars.add_task(title, total=total)
        bars.update(tasks[title], completed=done, total=total)

    try:
        with cursor_of_shell(bars.live):
            yield tell
    finally:
        is_over = True
        with _interrupts_later():
            bars.stop()


@contextmanager
def cursor_of_shell(live: Live) -> Iterator[None]:
    """In the block a Ctrl-Z gives the shell the cursor, which a bar hides; after `fg` it is hidden again while the bar
    is drawn."""
    show = live.console.show_cursor
    with following_suspension(lambda number: show(number == signal.SIGSTOP or not live.is_started)):
        yield


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """A Ctrl-C that comes meanwhile is heard afterwards: a second one while a command ends would leave its bars half
    taken away, and the cursor with them. Signals are the first thread's alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if is_interrupted:
        signal.raise_signal(signal.SIGINT)
