"""Event loops whose limits do not depend on when a busy machine lets a process run.

`play_steadily`, for scenes of which both sides are tasks of one loop: a limit of half a second is then as good as one
of a minute, since whoever it is for has the processor for as long as it needs before it is over. `HeldLoop`, for a
server in a thread of its own: its time passes when the test says so.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any

LOOK_SECONDS = 0.02
"""How long the loop waits for files at a time."""

MOST_SECONDS = 0.05
"""What any turn of the loop takes by its clock at most."""


class ShortWaits(selectors.DefaultSelector):
    """Waits for LOOK_SECONDS at most, so that a longer turn is one in which the process did not run."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(LOOK_SECONDS if timeout is None else min(timeout, LOOK_SECONDS))


class SteadyLoop(asyncio.SelectorEventLoop):
    """Its `time`, by which all of asyncio's limits are counted, goes on by MOST_SECONDS at most in a turn."""

    def __init__(self) -> None:
        self._passed, self._seen = 0.0, time.monotonic()
        super().__init__(ShortWaits())

    def time(self) -> float:
        now = time.monotonic()
        self._passed += min(now - self._seen, MOST_SECONDS)
        self._seen = now
        return self._passed


def play_steadily(scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene to its end."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        runner.run(scene)


class HeldLoop(asyncio.SelectorEventLoop):
    """Once `hold` was called, its `time` stands still but for what it is told to pass. From any thread."""

    def __init__(self) -> None:
        self._held_at: float | None = None
        self._more = 0.0
        super().__init__(ShortWaits())

    def time(self) -> float:
        return self._more + (time.monotonic() if self._held_at is None else self._held_at)

    def hold(self) -> None:
        self._held_at = time.monotonic()

    def pass_seconds(self, seconds: float) -> None:
        """Let so much time pass, and the loop do what there is to do before and after that."""
        self._turn()
        self._more += seconds
        self._turn()

    def let_go(self) -> None:
        """From now on time passes by itself again."""
        if self._held_at is not None:
            self._more -= time.monotonic() - self._held_at
            self._held_at = None

    def _turn(self) -> None:
        for _ in range(2):  # in the first it may have looked for files already
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self).result(60)
