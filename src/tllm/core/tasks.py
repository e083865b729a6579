"""Tasks of asyncio that run beside others: none fails without a word, and none is left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("tllm")


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that nobody awaits before its end: the log says at once what it failed with."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


async def work_beside(task: asyncio.Task[Any], work: Coroutine[Any, Any, None]) -> None:
    """Do some work to its end, or until a task ends without which it is of no use. Raises what the work fails with."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, task), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        await end_tasks(working)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks that are wanted no more, and wait until they have ended. What one failed with before is for whoever
    awaits it, or was logged."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
