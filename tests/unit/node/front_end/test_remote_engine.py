"""A node's HTTP server and the coordinator, over channels in memory: requests, stored replies, losses and drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.cluster.channel_pair import channel_pair
from tests.support.serving.fake_engine import FakeEngine
from tllm.cluster.channel import HEAD, QUESTION, Channel, Gone, one_way
from tllm.cluster.http_messages import ServedModel, ServesHttp
from tllm.cluster.messages import Cancel, Message, Submit
from tllm.core.errors import ClusterError, RequestError
from tllm.node.front_end import remote_engine
from tllm.node.front_end.engine_link import EngineLink
from tllm.node.front_end.remote_engine import RemoteEngine, RemoteStreamStore
from tllm.node.serve import node_requests
from tllm.node.serve.node_requests import NodeRequests
from tllm.server.admission.account import Account, ApiKey
from tllm.server.http.auth import keys_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.engine_client import Health, RequestRouter
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.server.stored.stream_store import LocalStreamStore, TakenStream
from tllm.spec.request import Output, Request, SamplingParams, StreamRecord
from tllm.text.generation_config import GenerationConfig

IDS = list(range(10, 30))
MODEL = ServedModel(
    model_name="tiny",
    max_model_len=256,
    chat_template=None,
    tool_template=None,
    model_aliases=(),
    tool_call_parser="auto",
    reasoning_parser="auto",
    generation_config=GenerationConfig(temperature=0.6),
    started=1,
    fingerprint="",
    pooling=msgspec.json.encode(ModelPooling(hidden_size=8)),
    max_sequences=8,
    request_seconds=60.0,
    keep_streams=60.0,
    keep_streams_bytes=1 << 20,
)
ACCOUNT = Account(ApiKey("k", b""), time.monotonic)
NAME = "chatcmpl-" + "5" * 32


class Node:
    """A node whose HTTP server is attached to a coordinator."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self.here, self.there = here, _ = channel_pair(name)
        self.heard: list[Message] = []
        self.link = EngineLink()
        self.engine, self.store = RemoteEngine(self.link, MODEL), RemoteStreamStore(self.link, MODEL)
        coordinator.channels[name] = self.there

        async def heard(message: ServedModel) -> None:
            self.heard.append(message)

        self.tasks = [
            asyncio.create_task(here.run({ServedModel: heard})),
            asyncio.create_task(self.there.run(coordinator.requests.acts(name))),
        ]
        self.link.attach(here)
        here.post(ServesHttp())

    async def lose(self) -> None:
        """Its process is killed."""
        self.there.abort()
        self.tasks[1].cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def read(self, request: Request) -> list[int]:
        return [id async for output in self.engine.submit(request) for id in output.token_ids]


class Coordinator:
    """A fake engine, with a store of replies, behind `NodeRequests`."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.engine = engine
        self.channels: dict[str, Channel] = {}
        served = ServerSettings(**{"max_sequences": 8, **settings})
        self.router = RequestRouter(engine, Metrics("tiny"), served, keys_of(served))
        self.store = LocalStreamStore(self.router, None, served)
        self.requests = NodeRequests(lambda node, message: self.channels[node].post(message))

    def open(self) -> Coordinator:
        self.requests.open(MODEL, self.router, self.store)
        return self


def request(name: str = "r", tokens: int = 20) -> Request:
    return Request(id=name, prompt_ids=(1, 2), params=SamplingParams(max_tokens=tokens, ignore_eos=True))


def record(owner: str = "") -> StreamRecord:
    return StreamRecord(id=NAME, body=b"{}", owner=owner, created=1)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(limited())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def taken_up(node: Node, owner: str = "") -> TakenStream:
    taken = await node.store.take_up(NAME, owner)
    assert taken is not None
    return taken


def engine(hold_after: int | None = None) -> FakeEngine:
    made = FakeEngine(lambda _: IDS)
    made.hold_after = hold_after
    return made


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nobody comes; in others somebody may come late."""
    monkeypatch.setattr(remote_engine, "RESUME_SECONDS", 0.5)
    monkeypatch.setattr(node_requests, "OPEN_SECONDS", 0.3)


def test_the_model_is_told_to_whoever_asked_before_or_asks_after(short_waits: None) -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine())
        early = Node(coordinator, "lab-2")
        await asyncio.sleep(0.01)
        assert early.heard == []
        with pytest.raises(ClusterError, match="serves no requests yet"):
            await early.read(request())
        coordinator.open()
        late = Node(coordinator, "lab-3")
        await until(lambda: early.heard == late.heard == [MODEL])

    play(scene)


def test_a_request_runs_on_the_clusters_engine() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine()).open()
        node = Node(coordinator, "lab-2")
        assert await node.read(request()) == IDS
        coordinator.engine.fail_after, coordinator.engine.error = 3, RequestError("that cannot be", "leave it out")
        with pytest.raises(RequestError, match="that cannot be") as refused:
            await node.read(request("s"))
        assert refused.value.hint == "leave it out"
        assert coordinator.router.in_hand == 0

    play(scene)


def test_what_nodes_servers_had_computed_is_counted_and_what_waited_too_long_is_not() -> None:
    """One key for all of them: metrics of the first machine tell what became of its time."""

    async def scene() -> None:
        coordinator = Coordinator(engine()).open()
        node = Node(coordinator, "lab-2")

        def counted() -> list[str]:
            shown = coordinator.router.metrics.render({}).decode()
            return [line.split()[-1] for line in shown.splitlines() if line.startswith("tllm_key_prompt_tokens_total")]

        async def expired(request: Request) -> AsyncGenerator[Output, None]:
            yield Output(request_id=request.id, finish_reason="expired")

        computing, coordinator.engine.submit = coordinator.engine.submit, expired  # type: ignore[method-assign]
        assert await node.read(request("late")) == []
        await until(lambda: coordinator.router.is_idle)
        assert counted() == []
        coordinator.engine.submit = computing  # type: ignore[method-assign]
        assert await node.read(request()) == IDS
        await until(lambda: coordinator.router.is_idle)
        assert counted() == ["2.0"]

    play(scene)


def test_a_request_that_is_cancelled_before_it_began_is_not_computed() -> None:
    """The question and its cancellation may be read at one go, before the question's task has begun; or while the
    coordinator is not ready. It had run to its end then, for nobody."""

    async def scene() -> None:
        coordinator = Coordinator(engine())
        early = Node(coordinator, "lab-2")
        reading = asyncio.create_task(early.read(request("early")))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(0.05)
        coordinator.open()
        body = msgspec.msgpack.encode(Submit(request("r")))
        question = HEAD.pack(len(body), QUESTION, 7) + body
        early.here.post_frame(question + one_way(Cancel("r")))
        assert await early.read(request("s")) == IDS
        assert [one.id for one in coordinator.engine.submitted] == ["s"]
        other = Node(coordinator, "lab-3")
        assert await other.read(request("r")) == IDS, "what another node calls alike is another request"
        assert coordinator.router.is_idle

    play(scene)


def test_a_cancellation_that_comes_first_counts_after_many_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most requests have just ended when they are cancelled. What is remembered of these must leave room for others."""
    monkeypatch.setattr(node_requests, "MOST_UNWANTED", 2)

    async def scene() -> None:
        coordinator = Coordinator(engine()).open()
        node = Node(coordinator, "lab-2")
        for ended in ("a", "b", "c"):
            node.here.post(Cancel(ended))
        body = msgspec.msgpack.encode(Submit(request("r")))
        node.here.post_frame(HEAD.pack(len(body), QUESTION, 7) + body + one_way(Cancel("r")))
        assert await node.read(request("s")) == IDS
        assert [one.id for one in coordinator.engine.submitted] == ["s"]

    play(scene)


def test_a_name_that_is_taken_is_refused_and_harms_nobody() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=3)).open()
        node = Node(coordinator, "lab-2")
        await node.store.open(record(), [request(f"{'5' * 32}-0")], ACCOUNT)
        with pytest.raises(RequestError, match="already"):
            await node.store.open(record(), [request(f"{'5' * 32}-0")], ACCOUNT)
        readings = [asyncio.create_task(node.read(request())) for _ in range(2)]
        await until(lambda: coordinator.engine.running == 3)
        coordinator.engine.go_on.set()
        assert await asyncio.gather(*readings) == [IDS, IDS]
        assert await node.read(request()) == IDS and not any(task.done() for task in node.tasks)

    play(scene)


def test_closing_a_request_cancels_it_there() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=3)).open()
        node = Node(coordinator, "lab-2")
        outputs = node.engine.submit(request())
        assert (await anext(outputs)).token_ids == (10,)
        await outputs.aclose()
        await until(lambda: coordinator.engine.cancelled == ["r"])
        await until(lambda: coordinator.router.in_hand == 0)

    play(scene)


@pytest.mark.parametrize("together", [1, 3], ids=["one by one", "several in an output, as with drafts"])
def test_a_request_goes_on_at_the_coordinator_that_takes_anothers_place(together: int) -> None:
    async def scene() -> None:
        before, after = Coordinator(engine(hold_after=3)).open(), Coordinator(engine())
        before.engine.together = together
        after.engine.script = lambda request: IDS[len(request.output_ids) :]
        node = Node(before, "lab-2")
        outputs = node.engine.submit(request())
        ids = [id for _ in range(3 // together) for id in (await anext(outputs)).token_ids]
        await node.lose()
        node.link.detach()
        rest = asyncio.create_task(anext(outputs))
        successor = Node(after, "lab-2")
        node.link.attach(successor.here)
        await asyncio.sleep(0.1)
        assert not rest.done() and not after.engine.submitted, "a coordinator that is not ready is waited for"
        after.open()
        of_successor = [await rest] + [output async for output in outputs]
        assert ids + [output.token_ids[0] for output in of_successor] == IDS
        assert {output.request_id for output in of_successor} == {"r"}, "whoever asked knows no other id"
        (first,), (second,) = before.engine.submitted, after.engine.submitted
        assert second.output_ids == tuple(IDS[:3]) and second.params == first.params and first.params.seed is not None
        assert second.id != first.id, "the coordinator may be the same, and still have it"

    play(scene)


def test_each_loss_of_a_coordinator_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long reply may see several of them come and go."""
    now = [0.0]
    monkeypatch.setattr(remote_engine, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scene() -> None:
        def coordinator() -> Coordinator:
            made = Coordinator(engine(hold_after=3)).open()
            made.engine.script = lambda request: IDS[len(request.output_ids) :]
            return made

        present = node = Node(coordinator(), "lab-2")
        outputs, ids = node.engine.submit(request()), list[int]()
        for _ in range(3):
            ids += [id for _ in range(3) for id in (await anext(outputs)).token_ids]
            await present.lose()
            node.link.detach()
            now[0] += 2 * remote_engine.RESUME_SECONDS
            present = Node(coordinator(), "lab-2")
            node.link.attach(present.here)
        assert ids == IDS[:9]
        await outputs.aclose()

    play(scene)


def test_a_request_fails_where_no_coordinator_comes(short_waits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        node = Node(Coordinator(engine(hold_after=3)).open(), "lab-2")
        reading = asyncio.create_task(node.read(request()))
        await asyncio.sleep(0.05)
        await node.lose()  # and nobody tells the link
        with pytest.raises(Gone, match="went away"):
            await reading
        node.link.is_closed = True
        monkeypatch.setattr(remote_engine, "RESUME_SECONDS", 600.0)  # longer than a scene may take
        with pytest.raises(Gone):
            await node.read(request("s"))  # a node that ends waits for nothing

    play(scene)


def test_a_lost_node_waits_for_nothing_but_what_is_stored_goes_on(short_waits: None) -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=3)).open()
        lost, other = Node(coordinator, "lab-2"), Node(coordinator, "lab-3")
        reading = asyncio.create_task(lost.read(request()))
        await lost.store.open(record("key"), [request(f"{'5' * 32}-0")], ACCOUNT)
        taken = await taken_up(lost, "key")
        seen = [(await anext(taken.outputs)).token_ids[0] for _ in range(3)]
        await lost.lose()
        with pytest.raises(ClusterError):
            await reading
        await until(lambda: coordinator.engine.cancelled == ["r"])
        assert coordinator.engine.running == 1
        assert await other.store.take_up(NAME, "another key") is None
        again = await taken_up(other, "key")
        assert (again.seen, again.is_over) == (3, False)
        coordinator.engine.go_on.set()
        ids = [output.token_ids[0] async for output in again.outputs]
        assert ids[:3] == seen and ids == IDS
        assert len(coordinator.engine.submitted) == 2, "nothing was computed twice"
        ended = await taken_up(other, "key")
        assert (ended.seen, ended.is_over) == (20, True)

    play(scene)


def test_a_stored_reply_is_ended_from_another_node() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=3)).open()
        first, second = Node(coordinator, "lab-2"), Node(coordinator, "lab-3")
        await first.store.open(record(), [request(f"{'5' * 32}-0")], ACCOUNT)
        taken = await taken_up(first)
        assert not await second.store.end(NAME, "another key", forget=True)
        assert await second.store.end(NAME, "", forget=True)
        reasons = [output.finish_reason async for output in taken.outputs]
        assert reasons[-1] == "cancelled" and not await second.store.end(NAME, "", forget=True)

    play(scene)


def test_an_engine_that_fails_is_told_of_to_each_reader_alike() -> None:
    async def scene() -> None:
        failing = engine()
        failing.fail_after, failing.error = 2, ClusterError("lab-9 is gone", "wait")
        node = Node(Coordinator(failing).open(), "lab-2")
        await node.store.open(record(), [request(f"{'5' * 32}-0")], ACCOUNT)
        for _ in range(2):
            outputs = (await taken_up(node)).outputs
            assert [(await anext(outputs)).token_ids[0] for _ in range(2)] == IDS[:2]
            with pytest.raises(ClusterError, match="lab-9 is gone") as failed:
                await anext(outputs)
            assert failed.value.hint == "wait"

    play(scene)


def test_a_fault_of_ours_is_told_of_and_what_came_before_is_no_whole_reply() -> None:
    class Faulty(FakeEngine):
        async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
            async with aclosing(super().submit(request)) as outputs:
                yield await anext(outputs)
            raise KeyError("lost")

    async def scene() -> None:
        node = Node(Coordinator(Faulty(lambda _: IDS)).open(), "lab-2")
        with pytest.raises(ClusterError, match="KeyError: 'lost'"):
            await node.read(request())

    play(scene)


def test_a_first_machine_that_drains_or_is_full_takes_no_more() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=1), max_sequences=1).open()
        node = Node(coordinator, "lab-2")
        reading = asyncio.create_task(node.read(request()))
        await until(lambda: coordinator.engine.running == 1)
        with pytest.raises(ClusterError, match="1 sequence is in hand"):
            await node.read(request("s"))
        coordinator.router.draining = True
        with pytest.raises(ClusterError, match="shutting down"):
            await node.store.open(record(), [request("t")], ACCOUNT)
        assert coordinator.router.in_hand == 1, "which the drain waits for"
        coordinator.engine.go_on.set()
        assert await reading == IDS

    play(scene)


def test_how_the_engine_is(short_waits: None) -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine()).open()
        coordinator.engine.well = Health(running=2, node="lab-9", reason="late")
        node = Node(coordinator, "lab-2")
        assert not node.engine.health().ready
        await node.engine.refresh()
        assert node.engine.health() == coordinator.engine.well
        assert node.engine.stats() == coordinator.engine.stats()
        assert node.engine.status() == coordinator.engine.status()
        node.link.detach()
        await node.engine.refresh()
        assert not node.engine.health().ready and "no coordinator" in node.engine.health().reason
        with pytest.raises(ClusterError, match="no coordinator"):
            await node.read(request())

    play(scene)
