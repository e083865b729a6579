"""`CoroutineLoop`: the event loop in which the user's own coroutines are awaited, all at once.

There is one for a whole run, in a thread of its own. So what a coroutine keeps open from call to call, an HTTP client
say, stays usable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from tllm.training.tools.user_functions import told_of_errors

ENDING = 1.0
"""Seconds in which what was cancelled may end, when the loop is closed."""


class CoroutineLoop:
    """Its thread starts at once. One that a coroutine blocks is left behind when the loop is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"tllm-{name}", daemon=True)
        self._thread.start()

    def begin(self, name: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        """Call it in the loop and await what it returns. The result is what that comes to, a value or an error."""
        result: Future[Any] = Future()

        async def run() -> None:
            task = asyncio.current_task()
            assert task is not None, "it runs in the loop"
            task.set_name(name)
            with told_of_errors(result):
                result.set_result(await call())

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return result

    @property
    def computing(self) -> str | None:
        """The name of what runs in this moment and lets no other go on; None while all wait."""
        task = asyncio.current_task(self._loop)
        return None if task is None else task.get_name()

    def close(self) -> None:
        """Cancel what is awaited, and end the thread."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(ENDING)
        if not self._thread.is_alive():
            self._loop.close()

    def _end(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())
