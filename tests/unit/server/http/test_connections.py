"""Which connections have to go where there are too many, and how many the system allows."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tllm.server.http import protocol as protocol_module
from tllm.server.http.protocol import DESCRIPTORS_BESIDE, Connections, protocol
from tllm.server.http.request_head import head_fault
from tllm.server.http.settings import ServerSettings


class Link:
    """A connection that knows its room."""

    def __init__(self, room: Connections) -> None:
        self.room = room
        self.is_open = True
        room.idle(self)  # type: ignore[arg-type]

    def abort(self) -> None:
        self.is_open = False
        self.room.forget(self)  # type: ignore[arg-type]


def room_of(most: int) -> tuple[Any, list[Link]]:
    room = Connections(most)
    return room, [Link(room) for _ in range(most)]


def test_the_one_that_idles_longest_goes_and_none_that_works() -> None:
    room, (first, second, third) = room_of(3)
    room.work(first)
    assert room.make_room() and not second.is_open
    assert first.is_open and third.is_open and len(room) == 2
    fourth = Link(room)
    room.rest(first)
    assert room.make_room() and not third.is_open, "who worked idles for the shortest time"
    assert first.is_open and fourth.is_open


def test_where_all_work_there_is_no_room_until_one_rests_or_leaves() -> None:
    room, links = room_of(2)
    for link in links:
        room.work(link)
        room.work(link)
    assert len(room) == room.busy == 2 and not room.make_room()
    room.forget(links[0])
    assert room.make_room() and room.busy == 1
    Link(room)
    room.rest(links[1])
    room.rest(links[1])
    assert room.make_room() and room.busy == 0


class Sink(asyncio.Transport):
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """It stays."""


@pytest.mark.parametrize(("last", "status"), [(b"", b"200"), (b"Content-Length: 0\r\nContent-Length: 0\r\n", b"400")])
def test_a_head_that_comes_byte_by_byte_is_looked_at_once(
    last: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends 32 KB so, without a key, had the server look through them 32,000 times."""
    looked = list[bytes]()

    def look(data: bytes, most: int) -> str:
        looked.append(data)
        return head_fault(data, most)

    monkeypatch.setattr(protocol_module, "head_fault", look)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def scene() -> bytes:
        made: Any = protocol(ServerSettings())
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        config.load()
        connection, sink = made(config=config, server_state=ServerState(), app_state={}), Sink()
        connection.connection_made(sink)
        for byte in b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2000 + b"\r\n" + last + b"\r\n":
            connection.data_received(bytes([byte]))
        await asyncio.sleep(0.05)
        connection.connection_lost(None)
        return sink.sent

    assert asyncio.run(scene()).startswith(b"HTTP/1.1 " + status)
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (1 << 20, 1 << 20, 1000, None),
        (1024, 1 << 20, 1000, 1000 + DESCRIPTORS_BESIDE),
        (1024, resource.RLIM_INFINITY, 1000, 1000 + DESCRIPTORS_BESIDE),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None),
        (256, 1024, 1024 - DESCRIPTORS_BESIDE, 1024),
        (100, 100, 1, 100),
    ],
)
def test_there_are_no_more_than_the_system_allows(
    soft: int,
    hard: int,
    most: int,
    raised: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    with caplog.at_level(logging.WARNING):
        made: Any = protocol(ServerSettings(max_connections=1000))
    assert made.room.most == most
    assert asked == ([] if raised is None else [(raised, hard)])
    assert ("at most" in caplog.text) == (most < 1000)
