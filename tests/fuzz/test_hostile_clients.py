"""Clients that are slow, leave at any moment, or try to be understood in two ways: others are served meanwhile.

Over real sockets. What the server holds stays bounded: connections, bytes of replies that nobody takes, memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.multi.serving.test_openai_client import Running, eventually, running
from tests.support.serving.fake_engine import FakeEngine
from tests.support.steady_loop import play_steadily
from tests.unit.server.kit import TOKENIZER, say
from tllm.server import run as run_module
from tllm.server.http.settings import RequestLimits, ServerSettings
from tllm.server.run import serving
from tllm.spec.request import Output, Request

pytestmark = pytest.mark.timeout(300)

GOOD = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
HIGH_WATER = 64 << 10
"""Bytes that asyncio's transports hold of what is written before writers have to wait."""


class Endless(FakeEngine):
    """Makes one output after another only when it is asked, each of up to a hundred tokens; `made` counts them."""

    made = 0

    def _outputs(self, request: Request) -> Iterator[Output]:  # type: ignore[override]
        ids = self.script(request)
        left = request.params.max_tokens
        while left:
            some = ids[:left]
            left -= len(some)
            self.made += 1
            yield Output(request_id=request.id, token_ids=tuple(some), finish_reason=None if left else "length")


def endless() -> Endless:
    """Says more than the buffers of a connection take: with `LONG` tokens some 450 kB of events."""
    ids = TOKENIZER.encode(" hello" * 50, add_special_tokens=False)
    return Endless(lambda request: ids, TOKENIZER.eos_id or 0, max_model_len=10_000_000)


LONG = 60_000


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes 32 KiB of what is sent to a connection, and not 4 MiB, before the server has to keep it."""
    real = run_module.bind

    def bind(host: str, port: int) -> socket.socket:
        made = real(host, port)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)  # connections inherit it
        return made

    monkeypatch.setattr(run_module, "bind", bind)


def head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def asked(**more: Any) -> bytes:
    body = json.dumps({**json.loads(GOOD), **more}).encode()
    return head(len(body)) + body


def everything(link: socket.socket) -> bytes:
    """What comes until the other end closes."""
    parts = []
    with ExitStack() as stack:
        stack.callback(link.close)
        while part := _received(link):
            parts.append(part)
    return b"".join(parts)


def _received(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 16)
    except ConnectionError:
        return b""


def is_served(server: Running, seconds: float = 60.0) -> bool:
    return httpx.post(f"{server.url}/v1/completions", content=GOOD, timeout=seconds).status_code == 200


def is_idle(server: Running) -> bool:
    account = server.app.keys.anonymous
    return not server.engine.running and not server.app.router.in_hand and not account.concurrent


def after(server: Running, seconds: float) -> bool:
    """Let so much of the server's time pass."""
    server.loop.pass_seconds(seconds)
    return True


@contextmanager
def slow_reader(server: Running, request: bytes) -> Iterator[socket.socket]:
    """A client that asks, and has hardly any room for what it is told."""
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.socket()) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(60)
        link.connect((host, int(port)))
        link.sendall(request)
        yield link


def test_streams_that_nobody_reads_are_cut_off_and_others_are_served() -> None:
    engine = endless()
    with running(engine, send_seconds=30) as server, ExitStack() as stack:
        server.loop.hold()
        request = asked(stream=True, max_tokens=LONG)
        for _ in range(8):
            stack.enter_context(slow_reader(server, request))
        eventually(lambda: engine.running == 8)
        assert is_served(server)
        eventually(lambda: after(server, 10) and is_idle(server))
        assert len(engine.cancelled) == 8, "each generation ended with its client's connection"
        assert is_served(server)


def test_a_slow_reader_gets_its_whole_stream() -> None:
    """It reads for longer than a client may take nothing."""
    with running(endless(), send_seconds=5) as server, closing(server.socket()) as link:
        server.loop.hold()
        link.sendall(asked(stream=True, max_tokens=LONG))
        got, passed, end = 0, 0.0, b""
        while b"data: [DONE]" not in end:
            part = link.recv(1 << 13)
            assert part, "it was cut off"
            got, end = got + len(part), (end + part)[-30:]
            server.loop.pass_seconds(0.2)
            passed += 0.2
        assert got > 300_000 and passed > 7


def test_a_slow_reader_gets_its_whole_reply() -> None:
    """All of it is written at once, and taken for longer than a client may take nothing."""
    with running(endless(), send_seconds=5) as server, slow_reader(server, asked(max_tokens=LONG)) as link:
        parts, passed = [link.recv(1 << 13)], 0.0
        server.loop.hold()
        while not parts[-1].endswith(b"}"):
            server.loop.pass_seconds(0.2)
            passed += 0.2
            parts.append(link.recv(1 << 13))
            assert parts[-1], f"it was cut off after {passed:.1f} s"
        assert json.loads(b"".join(parts).partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == LONG
        assert passed > 7


def test_a_whole_reply_that_nobody_takes_holds_its_connection_for_a_time_only() -> None:
    """64 MB, which no buffer of the system takes, from an application of its own."""
    settings = ServerSettings(port=0, send_seconds=0.5)
    body = b"x" * (64 << 20)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def scene() -> None:
        async with serving(app, settings) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(1.5)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(len(body))
            writer.close()

    play_steadily(scene())


def test_what_waits_to_be_sent_is_bounded_and_generation_waits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    paused = H11Protocol.pause_writing

    def pause(protocol: H11Protocol) -> None:
        sizes.append(protocol.transport.get_write_buffer_size())
        paused(protocol)

    monkeypatch.setattr(H11Protocol, "pause_writing", pause)
    engine = endless()
    with running(engine, send_seconds=30) as server:
        with slow_reader(server, asked(stream=True, max_tokens=LONG)):
            eventually(lambda: bool(sizes))
            made = -1
            while engine.made != made:
                made = engine.made
                time.sleep(0.5)
            assert engine.running == 1, "nothing is made that cannot be sent"
        eventually(lambda: is_idle(server))
    # Whoever writes goes on until the mark is passed, so by one event at most; an event of 50 words has no 4 KiB.
    assert all(HIGH_WATER < size < HIGH_WATER + 4096 for size in sizes)


def test_slow_writers_are_told_and_closed() -> None:
    with running(body_seconds=30, header_seconds=30) as server:
        server.loop.hold()
        links = [server.socket() for _ in range(20)]
        for place, link in enumerate(links):
            link.sendall(head(1000)[:20] if place % 2 else head(1000) + b"{")
        assert is_served(server)
        server.loop.pass_seconds(31)
        replies = [everything(link) for link in links]
        assert all(reply.startswith(b"HTTP/1.1 408") for reply in replies[::2])
        assert all(reply == b"" for reply in replies[1::2]), "half a head is no request"


def test_a_body_without_a_key_cannot_go_on_for_ever() -> None:
    with running(api_keys=("a-long-key",), header_seconds=30) as server, closing(server.socket()) as link:
        server.loop.hold()
        link.sendall(head(10**6))
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 401")

        def trickle() -> None:
            for _ in range(100):
                link.sendall(b"x")
                server.loop.pass_seconds(3)

        with pytest.raises(ConnectionError):
            trickle()


def test_idle_connections_give_way_to_those_that_ask() -> None:
    with running(max_connections=50, header_seconds=30) as server, ExitStack() as stack:
        links = [stack.enter_context(closing(server.socket())) for _ in range(250)]
        for link in links[::3]:
            link.sendall(head(5)[:30])
        assert is_served(server)
        for number in range(1000 - len(links)):
            link = stack.enter_context(closing(server.socket()))
            assert number % 100 or is_served(server), "what idles longest goes, and who asks now is served"
            links.append(link)
        assert is_served(server)
        eventually(lambda: sum(_is_open(link) for link in links) <= 50)


def _is_open(link: socket.socket) -> bool:
    if link.fileno() < 0:
        return False
    link.settimeout(0.001)
    try:
        return link.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_where_all_connections_work_one_more_is_told() -> None:
    engine = say()
    engine.hold_after = 0
    with running(engine, max_connections=5) as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(closing(server.socket())).sendall(asked())
        eventually(lambda: engine.running == 5)
        reply = everything(server.socket())
        assert reply.startswith(b"HTTP/1.1 503") and b"too_many_connections" in reply and b"retry-after: 1" in reply
        server.go_on()
        eventually(lambda: is_idle(server))
        assert is_served(server)


HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BODY = b"0\r\n\r\n" + HIDDEN
SMUGGLED = {
    "both, length first": head(len(BODY), "Transfer-Encoding: chunked") + BODY,
    "two lengths": head(len(BODY), "Content-Length: 5") + BODY,
    "the same length twice": head(len(GOOD), f"Content-Length: {len(GOOD)}") + GOOD + HIDDEN,
    "lengths in a list": head(5, "X: y").replace(b": 5", b": 5, 5") + b"hello" + HIDDEN,
    "a length with a sign": head(5).replace(b": 5", b": +5") + b"hello" + HIDDEN,
    "a length in hexadecimals": head(5).replace(b": 5", b": 0x5") + b"hello" + HIDDEN,
    "an unknown coding": head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: xchunked") + BODY,
    "two codings": head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked, identity") + BODY,
    "a coding and HTTP/1.0": head(0)
    .replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    .replace(b"1.1", b"1.0")
    + BODY,
    "a space before the colon": head(0).replace(b"Content-Length:", b"Content-Length :") + BODY,
    "a folded header": head(0, "X: y\r\n Transfer-Encoding: chunked") + BODY,
    "bare line feeds": head(0).replace(b"\r\n", b"\n") + HIDDEN,
    "one bare line feed": head(0, "X: y\nTransfer-Encoding: chunked") + BODY,
    "a bare carriage return": head(0, "X: y\rTransfer-Encoding: chunked") + BODY,
    "a null": head(0, "X: y\0z") + HIDDEN,
    "two hosts": head(len(GOOD), "Host: evil.example") + GOOD + HIDDEN,
    "no host": head(len(GOOD)).replace(b"Host: 127.0.0.1\r\n", b"") + GOOD + HIDDEN,
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_request_hidden_in_another_is_never_answered(name: str) -> None:
    with running() as server:
        link = server.socket()
        link.sendall(SMUGGLED[name])
        link.shutdown(socket.SHUT_WR)
        reply = everything(link)
        status = int(reply.split()[1])
        assert 400 <= status < 600 and b'"data"' not in reply.split(b"\r\n\r\n")[1]
        assert reply.count(b"HTTP/1.1 ") == 1
        assert not server.engine.submitted
        assert is_served(server)


@pytest.mark.parametrize(
    "body",
    [
        b"5;" + b"x" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
        b"F" * 30 + b"\r\nhello",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"\xff\xff\r\n",
    ],
)
def test_chunks_that_are_none_are_refused(body: bytes) -> None:
    with running(body_seconds=30) as server:
        server.loop.hold()
        link = server.socket()
        with suppress(ConnectionError):  # it may be closed while we send
            link.sendall(head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + body)
        eventually(lambda: after(server, 10) and bool(select.select([link], [], [], 0)[0]))
        reply = everything(link)
        assert reply == b"" or reply.startswith(b"HTTP/1.1 4")
        assert not server.engine.submitted and is_served(server)


def test_pipelined_requests_are_answered_in_their_order() -> None:
    with running() as server:
        link = server.socket()
        paths = ["/version", "/v1/models", "/nope", "/health"] * 50
        link.sendall(b"".join(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() for path in paths))
        link.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        reply = everything(link)
        statuses = [int(part.split()[0]) for part in reply.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [200, 200, 404, 200] * 50 + [200]


def test_a_flood_of_pipelined_requests_is_read_no_faster_than_it_is_answered() -> None:
    with running(send_seconds=1.0) as server:
        link = server.socket()
        link.settimeout(0.5)
        request = b"GET /v1/cluster HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000
        sent, flooded = 0, 200 * len(request)
        with suppress(TimeoutError, ConnectionError):
            while sent < flooded:  # we never read a reply
                sent += link.send(request)
        assert sent < flooded and is_served(server)
        link.close()


def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    dice = random.Random("leaving")
    with running(say(" word" * 30), header_seconds=5) as server:
        server.engine.delay = 0.002
        whole = [asked(stream=True, max_tokens=30), asked(max_tokens=30, n=3), asked(stream=True, n=2, max_tokens=9)]
        for _ in range(150):
            request = dice.choice(whole)
            link = server.socket()
            link.sendall(request[: dice.randrange(len(request) + 1)] if dice.random() < 0.5 else request)
            if dice.random() < 0.5:
                link.settimeout(0.02)
                with suppress(TimeoutError):
                    link.recv(dice.choice([1, 100, 10_000]))
            if dice.random() < 0.3:  # a reset instead of a farewell
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            link.close()
        eventually(lambda: is_idle(server))
        assert is_served(server)


def resident() -> int:
    """Bytes of this process in memory, the server's among them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_stays_as_it_is_however_often_clients_misbehave() -> None:
    """A round has 36 connections. Were each to leave 64 KiB behind, as much as its buffer may hold, a round would
    leave 2.25 MiB and three rounds 6.75 MiB. What is allowed for all three is what one such round would leave."""
    rounds, each, left = 3, 36, HIGH_WATER
    with running(endless(), send_seconds=0.3, body_seconds=0.3, header_seconds=0.3) as server:

        def misbehave() -> None:
            with ExitStack() as stack:
                for place in range(each):
                    kind = place % 4
                    if kind == 0:
                        stack.enter_context(slow_reader(server, asked(stream=True, max_tokens=LONG)))
                        continue
                    link = stack.enter_context(closing(server.socket()))
                    if kind == 1:
                        link.sendall(head(4 << 20) + b"x" * HIGH_WATER)
                    elif kind == 2:
                        link.sendall(SMUGGLED["bare line feeds"] + b"x" * 1000)
                    else:
                        link.sendall(asked(stream=True, max_tokens=LONG))
                        link.recv(10)
                time.sleep(0.4)
            eventually(lambda: is_idle(server))
            assert is_served(server)

        for _ in range(2):  # arenas and caches of the interpreter fill up
            misbehave()
        before = resident()
        for _ in range(rounds):
            misbehave()
        grown = resident() - before
        print(f"{rounds} rounds of {each} connections: {grown / 1024:.0f} KiB more")
        assert grown <= each * left


def test_big_bodies_at_once_are_bounded_together() -> None:
    limits = RequestLimits(max_body_bytes=1 << 20)
    with running(limits=limits, max_bodies_bytes=4 << 20, body_seconds=30) as server, ExitStack() as stack:
        server.loop.hold()
        links = [stack.enter_context(closing(server.socket())) for _ in range(10)]

        def fill(link: socket.socket) -> None:
            with suppress(ConnectionError):  # it may be refused meanwhile
                link.sendall(head(1 << 20) + b" " * ((1 << 20) - 1))  # all but the last byte

        threads = [threading.Thread(target=fill, args=(link,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: after(server, 10) and len(select.select(links, [], [], 0)[0]) == len(links))
        replies = [everything(link) for link in links]
        statuses = sorted(int(reply.split()[1]) for reply in replies if reply)
        assert statuses.count(408) <= 4 and set(statuses) <= {408, 503}
        assert len(statuses) == 0 or 503 in statuses
        assert server.app._attended._bodies.held == 0 and is_served(server)
