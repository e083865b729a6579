"""What other threads asked of a control thread's loop, once that thread ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from concurrent.futures import Future

import pytest

from tllm.core.errors import ClusterError
from tllm.node.weights.control_loop import ControlLoop


async def for_ever(began: threading.Event) -> None:
    began.set()
    await asyncio.Event().wait()


async def seven() -> int:
    return 7


def test_what_waits_is_cancelled_and_nothing_more_is_begun() -> None:
    loop, is_open, ends, began = ControlLoop(), threading.Event(), threading.Event(), threading.Event()
    called = list[str]()
    left = Future[int]()

    async def control() -> None:
        loop.open()
        is_open.set()
        await asyncio.to_thread(ends.wait, 10)
        await loop.close()
        left.set_result(len(asyncio.all_tasks()))

    thread = threading.Thread(target=lambda: asyncio.run(control()))
    thread.start()
    assert is_open.wait(20)
    assert loop.begin(seven()).result(20) == 7
    loop.call(lambda: called.append("before"))
    waiting = loop.begin(for_ever(began))
    assert began.wait(20)
    ends.set()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(20)
    assert left.result(20) == 1, "only `control` itself"
    with pytest.raises(ClusterError, match="has ended"):
        loop.begin(seven())
    loop.call(lambda: called.append("after"))
    thread.join(20)
    assert called == ["before"]


def test_nothing_is_begun_before_there_is_a_loop() -> None:
    with pytest.raises(ClusterError, match="has ended"):
        ControlLoop().begin(seven())
