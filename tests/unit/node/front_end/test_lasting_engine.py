"""Requests of a first machine's own server, whose process is deposed while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from tests.unit.node.front_end.test_remote_engine import (
    ACCOUNT,
    IDS,
    MODEL,
    NAME,
    Coordinator,
    Node,
    engine,
    play,
    record,
    request,
    until,
)
from tllm.cluster.consensus.replica import Deposed
from tllm.core.errors import ClusterError
from tllm.node.front_end import remote_engine
from tllm.node.front_end.engine_link import EngineLink
from tllm.node.front_end.lasting_engine import LastingEngine
from tllm.node.front_end.remote_engine import RESUME_SECONDS, RemoteEngine, RemoteStreamStore
from tllm.spec.request import Output, Request

GOT = 3


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which no coordinator comes; in others it may come late."""
    monkeypatch.setattr(remote_engine, "RESUME_SECONDS", 0.5)


DEPOSED = Deposed("this process coordinates no more")


async def _ids(outputs: AsyncGenerator[Output, None]) -> list[int]:
    return [id async for output in outputs for id in output.token_ids]


class First:
    """A first machine that computes `GOT` tokens of a request, and is deposed then."""

    def __init__(self) -> None:
        self.link = EngineLink()
        self.cluster = engine()
        self.cluster.fail_after, self.cluster.error = GOT, DEPOSED
        self.engine = LastingEngine(self.cluster, RemoteEngine(self.link, MODEL))

    async def read(self, asked: Request) -> list[Output]:
        return [output async for output in self.engine.submit(asked)]


def successor() -> Coordinator:
    """Whoever coordinates then, and computes the tokens that are left."""
    made = Coordinator(engine()).open()
    made.engine.script = lambda asked: IDS[len(asked.output_ids) :]
    return made


@pytest.mark.parametrize("together", [1, GOT], ids=["one by one", "several in an output, as with drafts"])
def test_a_request_goes_on_where_the_next_coordinator_is_and_no_token_is_computed_twice(together: int) -> None:
    async def scene() -> None:
        first, then = First(), successor()
        first.cluster.together = together
        reading = asyncio.create_task(first.read(request()))
        await asyncio.sleep(0.1)
        assert not reading.done(), "it waits until its process has joined again"
        first.link.attach(Node(then, "lab-1").here)
        outputs = await reading
        assert [id for output in outputs for id in output.token_ids] == IDS
        (asked,) = then.engine.submitted
        assert asked.output_ids == tuple(IDS[:GOT]) and asked.params.seed == first.cluster.submitted[0].params.seed

    play(scene)


def test_it_ends_where_none_is_found_in_time(short_waits: None) -> None:
    async def scene() -> None:
        with pytest.raises(ClusterError, match="no coordinator"):
            await First().read(request())

    play(scene)


def test_it_ends_with_the_reason_for_which_this_process_coordinates_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(remote_engine, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scene() -> None:
        first = First()
        reading = asyncio.create_task(first.read(request()))
        await asyncio.sleep(0.1)
        assert not reading.done()
        first.engine.refuse(DEPOSED)
        now[0] = RESUME_SECONDS + 1  # nobody was found until then
        with pytest.raises(Deposed, match="coordinates no more"):
            await reading

    play(scene)


def test_a_new_request_is_refused_at_once() -> None:
    async def scene() -> None:
        first = First()
        first.engine.refuse(DEPOSED)
        with pytest.raises(Deposed, match="coordinates no more"):
            await first.read(request())
        assert not first.cluster.submitted

    play(scene)


@pytest.mark.parametrize("is_open", [True, False], ids=["ready", "not ready yet"])
def test_who_reads_a_kept_reply_reads_on_where_it_is_kept_now(is_open: bool) -> None:
    """The next coordinator has what was shown, by agreement, and computes the rest itself: here nothing more is."""

    async def scene() -> None:
        before, then = Coordinator(engine(hold_after=GOT)).open(), successor()
        if not is_open:
            then = Coordinator(then.engine)
        link = EngineLink()
        await before.store.open(record(), [request()], ACCOUNT)
        taken = await before.store.take_up(NAME, "")
        assert taken is not None
        reading = asyncio.create_task(_ids(taken.outputs))
        await until(lambda: before.engine.running == 1)
        await asyncio.sleep(0.02)
        before.store.refuse(DEPOSED, RemoteStreamStore(link, MODEL).rest)
        await until(lambda: before.engine.running == 0)
        link.attach(Node(then, "lab-1").here)
        if not is_open:
            await asyncio.sleep(0.1)
            then.open()
        await then.store.open(record(), [request()], ACCOUNT)
        assert await reading == IDS

    play(scene)


def test_who_reads_a_kept_reply_that_nobody_goes_on_with_is_told_why() -> None:
    async def scene() -> None:
        before = Coordinator(engine(hold_after=GOT)).open()
        await before.store.open(record(), [request()], ACCOUNT)
        taken = await before.store.take_up(NAME, "")
        assert taken is not None
        reading = asyncio.create_task(_ids(taken.outputs))
        await asyncio.sleep(0.02)
        before.store.refuse(DEPOSED)
        with pytest.raises(Deposed, match="coordinates no more"):
            await reading

    play(scene)
