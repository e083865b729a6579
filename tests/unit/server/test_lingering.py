"""A server that takes no more requests, and whose replies in hand go on in its event loop."""

from __future__ import annotations

import asyncio

import httpx

from tests.unit.server.kit import say, serve
from tllm.server.http.settings import ServerSettings
from tllm.server.run import OpenReplies, bind, serve_http

ASKED = {"prompt": [1, 2], "max_tokens": 5, "ignore_eos": True, "stream": True}


def test_replies_go_on_while_another_listens_at_the_address() -> None:
    async def scene() -> None:
        engine = say("one two three four five six seven")
        engine.hold_after = 2
        app, stop, urls = serve(engine, port=0), asyncio.Event(), asyncio.Queue[str]()
        serving = asyncio.create_task(serve_http(app, urls.put_nowait, stop, signals=False, lingers=lambda: True))
        url = await urls.get()
        port = int(url.rpartition(":")[2])
        async with (
            httpx.AsyncClient(timeout=20) as client,
            client.stream("POST", f"{url}/v1/completions", json=ASKED) as reply,
        ):
            lines = reply.aiter_lines()
            seen = [await anext(lines)]
            stop.set()
            left = await serving
            assert isinstance(left, OpenReplies) and engine.running == 1
            bind(ServerSettings(version="").host, port).close()
            ending = asyncio.create_task(left.end())
            await asyncio.sleep(0.05)
            assert not ending.done(), "what is in hand is let finish"
            engine.go_on.set()
            seen += [line async for line in lines]
        assert "data: [DONE]" in seen
        await ending

    asyncio.run(asyncio.wait_for(scene(), 20))
