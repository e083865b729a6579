"""`VirtualLoop`: an event loop on a clock of its own, which jumps to the next timer as soon as nothing is left to do.

Code that waits on asyncio alone runs in it as in any other loop, an hour of waiting in the time that its work takes.
Sockets and threads are looked at, but nothing ever waits for them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _ClockSelector(selectors.DefaultSelector):
    """Looks at the files without waiting, and lets the clock go on by as long as it was to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError(f"after {self.now:g} s everything waits, and nothing is to come")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time begins at 0. A loop in which nothing can happen any more ends with RuntimeError."""

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtually(loop: VirtualLoop, scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene to its end, cancel what it left, and close the loop."""
    try:
        loop.run_until_complete(scene)
    finally:
        loop.run_until_complete(_end_all())
        loop.close()


async def _end_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
