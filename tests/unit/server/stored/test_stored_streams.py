"""What is kept of replies that may be taken up: for how long, how much, and for whom."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tllm.core.errors import ClusterError, RequestError
from tllm.server.stored.kept_bytes import kept_bytes
from tllm.server.stored.stored_streams import StoredStream, StoredStreams
from tllm.spec.request import Output, Request, SamplingParams, StreamRecord

ASKED = Request(id="r", prompt_ids=(1,), params=SamplingParams())

ASKED_BYTES = kept_bytes((StreamRecord(id="a", body=b"", owner="", created=1), (ASKED,)))


class Kept:
    """Streams on a clock that stands still, and those that were dropped before their end."""

    def __init__(self, seconds: float = 60, max_bytes: int = 1 << 20) -> None:
        self.now = 100.0
        self.dropped: list[str] = []
        self.streams = StoredStreams(
            seconds, max_bytes, lambda stream: self.dropped.append(stream.record.id), lambda: self.now
        )

    def open(self, name: str, owner: str = "", body: bytes = b"", requests: tuple[str, ...] = ("r",)) -> StoredStream:
        asked = [msgspec.structs.replace(ASKED, id=request) for request in requests]
        return self.streams.opened(StreamRecord(id=name, body=body, owner=owner, created=1), asked)

    def names(self) -> list[str]:
        return [name for name in ("a", "b", "c") if self.streams.find(name, "") is not None]


def output(number: int = 1, size: int = 0) -> Output:
    return Output(request_id="r", token_ids=(number,), error="x" * size)


def test_a_stream_is_kept_for_a_time_after_its_end() -> None:
    kept = Kept(seconds=60)
    stream = kept.open("a")
    kept.now += 1000
    assert kept.names() == ["a"], "it runs"
    kept.streams.closed(stream, "r")
    kept.now += 59
    assert kept.names() == ["a"]
    kept.now += 1
    assert kept.names() == [] and kept.streams.nbytes == 0 and kept.dropped == []


def test_only_its_owner_finds_it() -> None:
    kept = Kept()
    kept.open("a", owner="one key")
    assert kept.streams.find("a", "one key") is not None
    assert kept.streams.find("a", "another") is kept.streams.find("a", "") is kept.streams.find("b", "one key") is None


def test_a_name_is_given_once() -> None:
    kept = Kept()
    kept.open("a")
    with pytest.raises(RequestError, match="already"):
        kept.open("a")


def test_it_ends_with_its_last_request_or_with_an_error() -> None:
    kept = Kept()
    stream = kept.open("a", requests=("r", "s"))
    kept.streams.closed(stream, "r")
    assert not stream.is_over
    kept.streams.closed(stream, "s", ClusterError("gone"))
    assert stream.is_over and isinstance(stream.error, ClusterError)
    kept.streams.closed(stream, "s", ClusterError("later"))
    assert stream.error.message == "gone"


def test_what_has_ended_makes_room_first_and_the_oldest_before_the_others() -> None:
    kept = Kept(max_bytes=3000 + 3 * ASKED_BYTES)
    for name in ("b", "a"):
        stream = kept.open(name, body=b"x" * 800)
        kept.streams.closed(stream, "r")
        kept.now += 1
    runs = kept.open("c")
    kept.streams.delivered(runs, output(size=1000))
    assert kept.names() == ["a", "b", "c"]
    kept.streams.delivered(runs, output(size=500))
    assert kept.names() == ["a", "c"], "b ended before a"
    kept.streams.delivered(runs, output(size=800 + ASKED_BYTES))
    assert kept.names() == ["c"] and kept.dropped == []
    assert kept.streams.nbytes == runs.nbytes <= 3000 + 3 * ASKED_BYTES


def test_then_what_nobody_reads_and_last_what_grew() -> None:
    kept = Kept(max_bytes=2000 + 2 * ASKED_BYTES)
    unread, read, grown = kept.open("a"), kept.open("b"), kept.open("c")
    read.readers = grown.readers = 1
    kept.streams.delivered(unread, output(size=900))
    kept.streams.delivered(grown, output(size=1200))
    assert kept.names() == ["b", "c"] and kept.dropped == ["a"]
    kept.streams.delivered(grown, output(size=1200))
    assert kept.names() == ["b"] and kept.dropped == ["a", "c"]
    kept.streams.delivered(grown, output(7))
    assert [one.token_ids for one in grown.outputs] == [(1,), (1,), (7,)], "who reads it reads on"
    assert kept.streams.nbytes == read.nbytes


def test_what_is_too_large_is_not_kept_at_all() -> None:
    kept = Kept(max_bytes=100)
    stream = kept.open("a", body=b"x" * 200)
    assert kept.names() == [] and not kept.streams.is_kept(stream) and kept.dropped == ["a"]


def test_a_reader_waits_for_what_comes_and_for_the_end() -> None:
    async def work() -> None:
        kept = Kept()
        stream = kept.open("a")
        kept.streams.delivered(stream, output())
        await stream.wait(0)
        waiting = asyncio.create_task(stream.wait(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        kept.streams.delivered(stream, output())
        await waiting
        ending = asyncio.create_task(stream.wait(2))
        await asyncio.sleep(0)
        kept.streams.closed(stream, "r")
        await ending
        assert stream.is_over

    asyncio.run(work())
