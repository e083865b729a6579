"""`ControlLoop`: lets other threads call the event loop of a node's control thread, until that thread ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tllm.core.errors import ClusterError
from tllm.core.tasks import end_tasks

T = TypeVar("T")


class ControlLoop:
    """Nothing is given to the loop after `close`, which ends what was: nobody waits for what never ran, and no
    connection is left half open."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._giving = threading.Lock()
        self._begun: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Of the control thread: this is its loop."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Of the control thread: cancel what waits, and let it end."""
        with self._giving:
            self._loop = None
        for _ in range(2):  # what was just given becomes a task, and begins
            await asyncio.sleep(0)
        await end_tasks(*self._begun)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """What the work comes to. ClusterError once the control thread ends."""

        async def noted() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._begun.add(task)
            task.add_done_callback(self._begun.discard)
            return await work

        with self._giving:
            if self._loop is not None:
                return asyncio.run_coroutine_threadsafe(noted(), self._loop)
        work.close()
        raise ClusterError("this node's part has ended")

    def call(self, function: Callable[[], None]) -> None:
        """Call it there, or not at all once the control thread ends."""
        with self._giving:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)
