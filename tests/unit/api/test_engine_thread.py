"""`EngineThread`: calls of other threads, and its end."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.api.interrupted_call import interrupt_when_it_waits
from tllm.api.engine_thread import EngineThread
from tllm.core.errors import ClusterError
from tllm.server.openai.engine_client import EngineClient


@asynccontextmanager
async def opening() -> AsyncIterator[EngineClient]:
    yield FakeEngine(lambda request: [])


def test_who_waits_for_a_call_when_it_is_closed_is_told() -> None:
    engine, began = EngineThread(opening()), threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(lambda: engine.run(wait()))
        assert began.wait(20)
        engine.close()
        with pytest.raises(ClusterError, match="was closed"):
            waiting.result(20)
    with pytest.raises(ClusterError, match="was closed"):
        engine.run(wait())


@pytest.fixture
def interrupt() -> Iterator[threading.Thread]:
    """Started, it is Ctrl-C as soon as this thread waits for the engine's."""
    thread = threading.Thread(target=interrupt_when_it_waits, args=(threading.get_ident(),))
    yield thread
    thread.join()


def test_an_interrupt_ends_a_stream_and_no_other_call(interrupt: threading.Thread) -> None:
    ended = threading.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    engine = EngineThread(opening())
    stream = engine.iterate(numbers())
    assert next(stream) == 1
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert ended.is_set()
    assert engine.run(asyncio.sleep(0, "well")) == "well"
    engine.close()


def test_an_interrupt_ends_the_opening(interrupt: threading.Thread) -> None:
    given_up = threading.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[EngineClient]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.set()
            raise
        yield FakeEngine(lambda request: [])

    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        EngineThread(never())
    assert given_up.is_set()


def test_an_interrupt_that_another_thread_receives_is_heard() -> None:
    """As is one that comes just before the wait, which no test can time."""

    @asynccontextmanager
    async def never() -> AsyncIterator[EngineClient]:
        await asyncio.Event().wait()
        yield FakeEngine(lambda request: [])

    waiting = threading.get_ident()
    interrupt = threading.Thread(target=lambda: interrupt_when_it_waits(waiting, threading.get_ident()))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        EngineThread(never())
    interrupt.join()


def test_a_timeout_of_the_work_is_its_own() -> None:
    async def late() -> None:
        raise TimeoutError("late")

    engine = EngineThread(opening())
    with pytest.raises(TimeoutError, match="late"):
        engine.run(late())
    engine.close()


def test_an_opening_that_is_cancelled_leaves_nobody_waiting() -> None:
    @asynccontextmanager
    async def cancelled() -> AsyncIterator[EngineClient]:
        if threading.current_thread() is not threading.main_thread():
            raise asyncio.CancelledError
        yield FakeEngine(lambda request: [])

    with pytest.raises(ClusterError, match="cancelled while it was opened"):
        EngineThread(cancelled())


def test_a_call_may_be_the_last_that_knows_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a Ctrl-C, when whoever called has left. A thread that joins itself ended in a traceback."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Owner:
        def __init__(self) -> None:
            self.engine, self.may_end = EngineThread(opening()), asyncio.Event()

        async def work(self) -> None:
            await self.may_end.wait()

    owner = Owner()
    thread, loop, may_end = owner.engine._thread, owner.engine._loop, owner.may_end
    asyncio.run_coroutine_threadsafe(owner.work(), loop)
    del owner
    loop.call_soon_threadsafe(may_end.set)
    thread.join(20)
    assert not thread.is_alive() and not told
