"""Replies that may be taken up outlive the process that runs them: what was seen of one is never seen otherwise."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import msgspec
import pytest

from tests.unit.node.front_end.test_remote_engine import (
    ACCOUNT,
    IDS,
    NAME,
    Coordinator,
    Node,
    engine,
    play,
    record,
    until,
)
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.consensus.replicated_state import AnyEntry, ReplicatedMachine, ReplyGrown, ReplyOpened, encoded
from tllm.core.errors import ClusterError, TllmError
from tllm.node.replication import replicated_replies
from tllm.node.replication.replicated_replies import ReplicatedReplies
from tllm.spec.request import KeptReply, Output, Request, SamplingParams, StreamRecord, TokenLogprobs

FIRST, SECOND = f"{'5' * 32}-0", f"{'5' * 32}-1"


class Agreeing:
    """A coordinator whose replicas agree on entries while `is_open`, and what they have."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.machine = coordinator, ReplicatedMachine()
        self.may_agree = asyncio.Event()
        self.may_agree.set()
        self.entries: list[AnyEntry] = []
        self.is_deposed = False
        self.replies = ReplicatedReplies(self.propose)
        self.replies.keep(coordinator.store.streams, {})
        self.task = asyncio.create_task(self.replies.run())

    async def propose(self, entry: AnyEntry) -> None:
        await self.may_agree.wait()
        if self.is_deposed:
            raise Deposed("another coordinates", "")
        self.entries.append(entry)
        self.machine.apply(encoded(entry))

    @property
    def kept(self) -> dict[str, KeptReply]:
        return self.machine.state.replies

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def asked(name: str = FIRST, **params: Any) -> Request:
    chosen = {"max_tokens": 20, "ignore_eos": True, **params}
    return Request(id=name, prompt_ids=(1, 2), params=SamplingParams(**chosen))


def going_on(**settings: Any) -> Coordinator:
    """The coordinator that takes over: its engine goes on from the tokens of a request."""
    after = Coordinator(engine(), **settings)
    after.engine.script = lambda request: IDS[len(request.output_ids) :]
    return after


async def read(coordinator: Coordinator, owner: str = "") -> list[Output]:
    taken = await coordinator.store.take_up(NAME, owner)
    assert taken is not None
    return [output async for output in taken.outputs]


def ids_of(outputs: list[Output], name: str = FIRST) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


def test_readers_see_what_the_replicas_have_and_no_more() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=3))
        agreeing = Agreeing(coordinator)
        await coordinator.store.open(record(), [asked()], ACCOUNT)
        await until(lambda: len(agreeing.kept[NAME].outputs) == 3)
        agreeing.may_agree.clear()
        coordinator.engine.go_on.set()
        await until(lambda: not coordinator.engine.running)
        taken = await coordinator.store.take_up(NAME, "")
        assert taken is not None and (taken.seen, taken.is_over) == (3, False)
        seen = [await anext(taken.outputs) for _ in range(3)]
        reading = asyncio.create_task(anext(taken.outputs))
        await asyncio.sleep(0.05)
        assert not reading.done() and tuple(seen) == agreeing.kept[NAME].outputs
        agreeing.may_agree.set()
        rest = [await reading, *[output async for output in taken.outputs]]
        assert ids_of([*seen, *rest]) == IDS and agreeing.kept[NAME].is_over
        grown = [entry for entry in agreeing.entries if isinstance(entry, ReplyGrown)]
        assert len(grown) < len(IDS), "what has come while others agreed goes together"
        assert await coordinator.store.end(NAME, "", forget=True)
        await until(lambda: not agreeing.kept)
        await agreeing.end()

    play(scene)


def test_a_reply_is_there_when_its_beginning_was_agreed_on() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine())
        agreeing = Agreeing(coordinator)
        agreeing.may_agree.clear()
        opening = asyncio.create_task(coordinator.store.open(record(), [asked()], ACCOUNT))
        await asyncio.sleep(0.05)
        assert not opening.done()
        agreeing.may_agree.set()
        await opening
        assert agreeing.kept[NAME].requests[0].params.seed is not None, "whoever goes on samples the same"
        await agreeing.end()

    play(scene)


def test_another_coordinator_goes_on_with_a_reply_from_the_tokens_that_it_has() -> None:
    async def scene() -> None:
        before, after = Coordinator(engine(hold_after=3)).open(), going_on()
        agreeing = Agreeing(before)
        node = Node(before, "lab-2")
        await node.store.open(record("key"), [asked(), asked(SECOND)], ACCOUNT)
        taken = await node.store.take_up(NAME, "key")
        assert taken is not None
        outputs = [await anext(taken.outputs) for _ in range(6)]
        reading = asyncio.create_task(anext(taken.outputs))
        await node.lose()
        node.link.detach()
        await agreeing.end()
        after.store.restore(agreeing.kept[NAME], ACCOUNT)
        after.open()
        node.link.attach(Node(after, "lab-2").here)
        outputs += [await reading, *[output async for output in taken.outputs]]
        assert ids_of(outputs) == ids_of(outputs, SECOND) == IDS
        assert [request.output_ids for request in after.engine.submitted] == [tuple(IDS[:3])] * 2
        assert outputs == await read(after, "key"), "and whoever takes it up later sees the same"
        assert after.router.in_hand == 0

    play(scene)


def test_a_follower_reads_on_from_a_coordinator_that_still_computes() -> None:
    async def scene() -> None:
        before, after = Coordinator(engine(hold_after=3)).open(), going_on()
        after.engine.hold_after = 2
        agreeing = Agreeing(before)
        node = Node(before, "lab-2")
        await node.store.open(record(), [asked()], ACCOUNT)
        taken = await node.store.take_up(NAME, "")
        assert taken is not None
        outputs = [await anext(taken.outputs) for _ in range(3)]
        reading = asyncio.create_task(anext(taken.outputs))
        await node.lose()
        node.link.detach()
        await agreeing.end()
        after.store.restore(agreeing.kept[NAME], ACCOUNT)
        after.open()
        node.link.attach(Node(after, "lab-2").here)
        outputs += [await reading, await anext(taken.outputs)]
        await asyncio.sleep(0.1)  # for whatever else is on its way there
        after.engine.go_on.set()
        outputs += [output async for output in taken.outputs]
        assert ids_of(outputs) == IDS

    play(scene)


def test_what_had_ended_is_not_run_again() -> None:
    async def scene() -> None:
        after = going_on(max_sequences=1)
        ended = tuple(Output(request_id=FIRST, token_ids=(token,)) for token in IDS[:19])
        ended += (Output(request_id=FIRST, token_ids=(IDS[19],), finish_reason="length"),)
        half = tuple(Output(request_id=SECOND, token_ids=(token,), cached_tokens=2) for token in IDS[:1])
        reply = KeptReply(record=record(), requests=(asked(), asked(SECOND)), outputs=(*ended, *half))
        after.store.restore(reply, ACCOUNT)
        failed = StreamRecord(id="resp_" + "6" * 32, body=b"{}", owner="", created=1)
        after.store.restore(
            KeptReply(record=failed, requests=(asked("x"),), is_over=True, error="lab-9 is gone"), ACCOUNT
        )
        outputs = await read(after)
        assert ids_of(outputs) == ids_of(outputs, SECOND) == IDS
        assert [request.id for request in after.engine.submitted] == [SECOND]
        taken = await after.store.take_up(failed.id, "")
        assert taken is not None and taken.is_over
        with pytest.raises(TllmError, match="lab-9 is gone"):
            await anext(taken.outputs)

    play(scene)


def test_what_was_told_once_is_not_asked_for_again() -> None:
    async def scene() -> None:
        after = going_on()
        scored = (None, TokenLogprobs(2, -0.5, ()))
        of_first = (TokenLogprobs(IDS[0], -1.0, ()),)
        told = Output(request_id=FIRST, token_ids=(IDS[0],), prompt_logprobs=scored, logprobs=of_first)
        wanted = asked(prompt_logprobs=1, logprobs=1)
        after.store.restore(KeptReply(record=record(), requests=(wanted,), outputs=(told,)), ACCOUNT)
        outputs = await read(after)
        assert ids_of(outputs) == IDS
        assert [bool(output.prompt_logprobs) for output in outputs] == [True] + [False] * 19
        assert all(output.logprobs for output in outputs)

    play(scene)


def test_a_process_that_coordinates_no_more_shows_nothing_further() -> None:
    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=3))
        agreeing = Agreeing(coordinator)
        await coordinator.store.open(record(), [asked()], ACCOUNT)
        await until(lambda: len(agreeing.kept[NAME].outputs) == 3)
        agreeing.is_deposed = True
        coordinator.engine.go_on.set()
        with pytest.raises(Deposed):
            await agreeing.task
        await until(lambda: not coordinator.engine.running)
        taken = await coordinator.store.take_up(NAME, "")
        assert taken is not None and (taken.seen, taken.is_over) == (3, False)

    play(scene)


def test_a_reply_that_is_too_long_is_left_out_and_its_readers_see_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicated_replies, "REPLIES_BYTES", 1500)

    async def scene() -> None:
        coordinator = Coordinator(engine())
        agreeing = Agreeing(coordinator)
        await coordinator.store.open(record(), [asked()], ACCOUNT)
        assert ids_of(await read(coordinator)) == IDS
        await until(lambda: NAME not in agreeing.kept)
        long = msgspec.structs.replace(record(), id="chatcmpl-" + "7" * 32, body=b"x" * 2000)
        await coordinator.store.open(long, [asked(f"{'7' * 32}-0")], ACCOUNT)
        assert long.id not in agreeing.kept
        assert "too long to be replicated" in caplog.text and "no room" not in caplog.text
        await agreeing.end()

    play(scene)


def test_replies_that_grow_beyond_the_limit_together_are_not_all_replicated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them is short enough by itself, and there was room for all when they began."""
    monkeypatch.setattr(replicated_replies, "REPLIES_BYTES", 9000)

    async def scene() -> None:
        coordinator = Coordinator(engine())
        agreeing = Agreeing(coordinator)
        names = [f"chatcmpl-{digit * 32}" for digit in "678"]
        for name in names:
            await coordinator.store.open(
                msgspec.structs.replace(record(), id=name), [asked(f"{name[-32:]}-0")], ACCOUNT
            )
            taken = await coordinator.store.take_up(name, "")
            assert taken is not None
            assert ids_of([output async for output in taken.outputs], f"{name[-32:]}-0") == IDS
        sizes = [len(msgspec.msgpack.encode(reply)) for reply in agreeing.kept.values()]
        assert len(sizes) == 2 and sum(sizes) <= 9000 < sum(sizes) * 3 / 2, "a third one would be too much"
        assert any(isinstance(entry, ReplyOpened) and entry.record.id == names[2] for entry in agreeing.entries)
        assert f"{names[2]} has no room beside the other replies" in caplog.text and "too long" not in caplog.text
        await agreeing.end()

    play(scene)


def test_what_replies_take_is_not_summed_for_each_output() -> None:
    """There may be thousands of them, and each has an output for every token."""

    class Unsummed(dict[str, int]):
        def values(self) -> NoReturn:
            raise AssertionError("all of them are looked at")

    async def scene() -> None:
        coordinator = Coordinator(engine())
        agreeing = Agreeing(coordinator)
        agreeing.replies._sizes = Unsummed()
        await coordinator.store.open(record(), [asked()], ACCOUNT)
        assert ids_of(await read(coordinator)) == IDS
        assert agreeing.replies._taken == sum(agreeing.replies._sizes[name] for name in agreeing.kept) > 0
        assert await coordinator.store.end(NAME, "", forget=True)
        await until(lambda: not agreeing.kept)
        assert agreeing.replies._taken == 0
        await agreeing.end()

    play(scene)


def test_a_follower_ends_where_nobody_has_the_reply() -> None:
    async def scene() -> None:
        before, after = Coordinator(engine(hold_after=3)).open(), going_on().open()
        node = Node(before, "lab-2")
        await node.store.open(record(), [asked()], ACCOUNT)
        taken = await node.store.take_up(NAME, "")
        assert taken is not None
        for _ in range(3):
            await anext(taken.outputs)
        reading = asyncio.create_task(anext(taken.outputs))
        await node.lose()
        node.link.attach(Node(after, "lab-2").here)
        with pytest.raises(ClusterError, match="went away"):
            await reading

    play(scene)


def test_a_reply_that_grows_all_the_time_keeps_no_other_waiting() -> None:
    """Where replicas are as far away as one token takes, the reader of another reply saw nothing until it had ended."""

    async def scene() -> None:
        coordinator = Coordinator(engine(hold_after=1))
        agreeing = Agreeing(coordinator)
        await coordinator.store.open(record(), [asked()], ACCOUNT)
        other = msgspec.structs.replace(record(), id="resp_" + "7" * 32)
        await coordinator.store.open(other, [asked("z")], ACCOUNT)
        await until(lambda: all(reply.outputs for reply in agreeing.kept.values()))
        growing, waiting = coordinator.store.streams.kept()
        assert (growing.record.id, waiting.record.id) == (NAME, other.id)
        agree = agreeing.replies._propose

        async def slowly(entry: AnyEntry) -> None:
            growing.outputs.append(Output(request_id=FIRST, token_ids=(1,)))  # while it is agreed on
            await agree(entry)
            await asyncio.sleep(0)

        agreeing.replies._propose = slowly
        before = len(agreeing.entries)
        for stream, name in ((growing, FIRST), (waiting, "z")):
            stream.outputs.append(Output(request_id=name, token_ids=(1,)))
        agreeing.replies._news.set()
        await until(lambda: len(agreeing.kept[other.id].outputs) == 2 or len(agreeing.entries) > before + 50)
        assert len(agreeing.kept[other.id].outputs) == 2
        await agreeing.end()

    play(scene)
