"""A node's HTTP server that leaves, in the event loop of a server before it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tllm.node.front_end.front_end import FrontEnd
from tllm.node.front_end.server_loop import ServerLoop
from tllm.server.http.settings import ServerSettings


class _Replies:
    """What the server before it has in hand; it needs some time to end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    async def end(self) -> None:
        self.began.set()
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)


def test_replies_of_both_servers_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    replies, left = _Replies(), threading.Event()
    served, drained = threading.Event(), threading.Event()

    async def serve_model(front_end: FrontEnd, model: Any) -> None:
        served.set()
        await front_end._leaving.wait()
        while not drained.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(FrontEnd, "_serve_model", serve_model)
    loop = ServerLoop()
    loop.replies = replies  # type: ignore[assignment]
    front_end = FrontEnd(ServerSettings(version=""), lambda *words: None, left.set, loop=loop)
    front_end._in_loop(lambda: front_end._serve("a model"))  # type: ignore[arg-type]
    assert served.wait(20) and not replies.began.is_set(), "until it leaves they go on"
    front_end.leave()
    assert replies.began.wait(20), "while its own are let finish"
    drained.set()
    assert not left.wait(0.1), "what is in hand is waited for"
    replies.may_end.set()
    assert left.wait(20)
