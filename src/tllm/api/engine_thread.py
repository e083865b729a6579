"""`EngineThread`: an engine that answers on an event loop of its own, for callers that do not use asyncio."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from tllm.api.interruptible import result_of
from tllm.core.errors import ClusterError
from tllm.server.openai.engine_client import EngineClient

T = TypeVar("T")


class EngineThread:
    """Opens an engine in a thread, and closes it when `close` is called, or when the program ends.

    A call waits in the caller's thread for what a coroutine comes to in the engine's; an interrupt (Ctrl-C) cancels it.
    """

    def __init__(self, opening: AbstractAsyncContextManager[EngineClient]) -> None:
        """Wait until the engine can serve. Raises what it cannot be opened with."""
        self._loop = asyncio.new_event_loop()
        closing, opened = asyncio.Event(), Future[EngineClient]()
        self._thread = threading.Thread(
            target=_keep_open, args=(self._loop, opening, closing, opened), name="tllm-engine", daemon=True
        )
        self._thread.start()
        self._calling = threading.Lock()  # whoever calls before it is closed is heard
        self.close = weakref.finalize(self, _close, self._loop, closing, self._thread, self._calling)
        try:
            self.client = result_of(opened)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises. ClusterError where the engine was closed, if only meanwhile."""
        with self._calling:
            if not self.close.alive or not self._thread.is_alive():
                work.close()
                raise _closed()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return result_of(future)
        except CancelledError as error:
            raise _closed() from error
        except BaseException:
            future.cancel()
            raise

    def iterate(self, stream: AsyncIterator[T]) -> Generator[T, None, None]:
        """What the asynchronous iterator yields, one after the other; ending early closes it."""
        end, turn = object(), asyncio.Lock()  # a call that an interrupt cancels is over before the stream is closed

        async def following() -> T | object:
            async with turn:
                return await anext(stream, end)

        async def closing() -> None:
            aclose = getattr(stream, "aclose", None)
            if aclose is not None:
                async with turn:
                    await aclose()

        try:
            while (item := self.run(following())) is not end:
                yield item  # type: ignore[misc]  # it is not the mark of the end
        finally:
            if self.close.alive:
                self.run(closing())


def _keep_open(
    loop: asyncio.AbstractEventLoop,
    opening: AbstractAsyncContextManager[EngineClient],
    closing: asyncio.Event,
    opened: Future[EngineClient],
) -> None:
    """The thread: enter the context, tell whoever waits for it, and leave it when that is asked for. If that is asked
    before it is entered, it is given up."""

    async def keep() -> None:
        async with opening as client:
            opened.set_result(client)
            await closing.wait()

    async def give_up() -> None:
        await closing.wait()
        if not opened.done():
            task.cancel()

    task, giving_up = loop.create_task(keep()), loop.create_task(give_up())
    loop.run_until_complete(asyncio.wait((task,)))
    giving_up.cancel()
    calls = asyncio.all_tasks(loop)  # whose callers still wait
    for call in calls:
        call.cancel()
    if calls:
        loop.run_until_complete(asyncio.wait(calls))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    if task.cancelled():
        if not opened.done():  # whoever opened it was interrupted and has left, or waits and would for ever
            opened.set_exception(ClusterError("the engine was cancelled while it was opened", "open it again"))
        return
    error = task.exception()
    if error is not None and opened.done():
        raise error
    if error is not None:
        opened.set_exception(error)


def _close(
    loop: asyncio.AbstractEventLoop, closing: asyncio.Event, thread: threading.Thread, calling: threading.Lock
) -> None:
    """Let the context be left, after all calls so far have begun, and wait until it has been."""
    with calling:
        if thread.is_alive():
            loop.call_soon_threadsafe(closing.set)
    if thread is not threading.current_thread():  # a call of its own may be the last that knew the engine
        thread.join()


def _closed() -> ClusterError:
    return ClusterError("the engine was closed", "open another one")
