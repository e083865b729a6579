"""`EngineThread`: calls of other threads, and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from tests.support.serving.fake_engine import FakeEngine
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
        assert began.wait(5)
        engine.close()
        with pytest.raises(ClusterError, match="was closed"):
            waiting.result(5)
    with pytest.raises(ClusterError, match="was closed"):
        engine.run(wait())
