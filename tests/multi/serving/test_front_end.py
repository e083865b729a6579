"""A node's HTTP server in its thread, over a channel in memory: as the first machine's, until its node leaves."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.support.cluster.channel_pair import channel_pair
from tests.unit.node.front_end.test_remote_engine import MODEL, Coordinator
from tests.unit.server.kit import SAID, TEMPLATE, TOKENIZER, say
from tllm.cluster.http_messages import ServedModel
from tllm.cluster.weight_messages import Bytes, ReadBytes
from tllm.node.front_end import remote_engine
from tllm.node.front_end.front_end import FrontEnd
from tllm.server.http.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def model(**more: Any) -> ServedModel:
    values = {name: getattr(MODEL, name) for name in MODEL.__struct_fields__}
    return ServedModel(**{**values, "chat_template": TEMPLATE.source, "model_aliases": ("also",), **more})


class Served:
    """A node that is attached to a coordinator, whose engine says what it is told to."""

    def __init__(self, **options: Any) -> None:
        self.engine = say(**options)
        self.coordinator = Coordinator(self.engine)
        self.urls: list[str] = []
        self.left = threading.Event()
        settings = ServerSettings(port=0, api_keys=("key-of-this-node",))
        self.front_end = FrontEnd(settings, lambda name, url: self.urls.append(url), self.left.set)
        here, there = channel_pair("lab-2")
        self.coordinator.channels["lab-2"] = there
        packed = TOKENIZER.to_bytes()
        file = len(packed).to_bytes(8, "big") + packed

        async def read(wanted: ReadBytes) -> Bytes:
            data = file[wanted.start : wanted.stop]
            return Bytes(data, hashlib.sha256(data).digest())

        acts = {**self.coordinator.requests.acts("lab-2"), ReadBytes: read}
        self.tasks = [asyncio.create_task(here.run(self.front_end.acts())), asyncio.create_task(there.run(acts))]
        self.front_end.attached(here)

    def tell(self, told: ServedModel) -> None:
        self.coordinator.requests.open(told, self.coordinator.router, self.coordinator.store)

    async def url(self) -> str:
        await until(lambda: bool(self.urls))
        return self.urls[-1]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer key-of-this-node"}, timeout=60)


def play(scene: Callable[[Served], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            served = Served()
            try:
                await scene(served)
            finally:
                await asyncio.to_thread(served.front_end.close)
                for task in served.tasks:
                    task.cancel()
                await asyncio.gather(*served.tasks, return_exceptions=True)

    asyncio.run(limited())


def test_it_answers_with_what_the_first_machine_said() -> None:
    async def scene(served: Served) -> None:
        served.tell(model())
        async with client(await served.url()) as http:
            reply = (await http.post("/v1/chat/completions", json=CHAT)).json()
            assert reply["choices"][0]["message"]["content"] == SAID
            card = (await http.get("/v1/models")).json()["data"]
            assert [(one["id"], one["created"]) for one in card] == [("tiny", 1), ("also", 1)]
            assert (await http.get("/health/ready")).json() == {"status": "ready"}
            assert (await http.get("/v1/models", headers={"authorization": "Bearer other-key"})).status_code == 401

    play(scene)


def test_another_model_takes_the_place_of_the_first() -> None:
    async def scene(served: Served) -> None:
        served.tell(model())
        await served.url()
        served.tell(model(model_aliases=("new",)))
        await until(lambda: len(served.urls) == 2)
        async with client(served.urls[1]) as http:
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["tiny", "new"]

    play(scene)


def test_a_node_that_leaves_lets_its_requests_end_and_takes_no_new_ones() -> None:
    async def scene(served: Served) -> None:
        served.engine.hold_after = 3
        served.tell(model())
        async with client(await served.url()) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
            await until(lambda: served.engine.running == 1)
            served.front_end.leave()
            while (await http.get("/health/ready")).status_code != 503:
                await asyncio.sleep(0.01)
            refused = await http.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert not served.left.is_set() and served.front_end.is_leaving
            served.engine.go_on.set()
            assert (await asking).json()["choices"][0]["message"]["content"] == SAID
            assert await asyncio.to_thread(served.left.wait, 60)

    play(scene)


def test_requests_in_hand_fail_when_no_other_coordinator_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "RESUME_SECONDS", 1.0)

    async def scene(served: Served) -> None:
        served.engine.hold_after = 3
        served.tell(model())
        async with client(await served.url()) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
            await until(lambda: served.engine.running == 1)
            served.coordinator.channels["lab-2"].abort()
            served.front_end.detached()
            assert (await asking).status_code == 503
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503
            await until(lambda: not served.engine.running)

    play(scene)
