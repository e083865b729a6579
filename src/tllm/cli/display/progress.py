"""Progress on stderr: a bar on a terminal, else one line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

from tllm.cli.display.tables import amount

SECONDS_BETWEEN_LINES = 5.0

T = TypeVar("T")


class ShowProgress(Protocol):
    """Told how far a thing is: so many of so many bytes."""

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
            print(f"{title}: {amount(done)} of {amount(total)}", file=sys.stderr, flush=True)
            self._spoke[title] = now
        if done >= total:
            self._start.pop(title, None)
            self._spoke.pop(title, None)


@contextmanager
def _bars() -> Iterator[ShowProgress]:
    from rich.console import Console  # 40 ms that only a terminal pays
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")) or None)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bars = Bars(*columns, console=console, transient=True)
    tasks = {}

    def tell(title: str, done: int, total: int) -> None:
        bars.start()  # with the first news, not while nodes are waited for
        if title not in tasks:
            tasks[title] = bars.add_task(title, total=total)
        bars.update(tasks[title], completed=done, total=total)

    try:
        yield tell
    finally:
        bars.stop()
