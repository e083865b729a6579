"""What replicas agree on: entries, what they change, and that a second time they change nothing."""

from __future__ import annotations

import msgspec
import pytest

from tllm.cluster.consensus.replicated_state import (
    AnyEntry,
    ClusterEnded,
    ClusterFounded,
    CoordinatorBegan,
    EpochBegan,
    MembersChanged,
    ReplicatedMachine,
    ReplicatedWork,
    ReplyForgotten,
    ReplyGrown,
    ReplyOpened,
    SigningKey,
    StepsTrained,
    TokensChanged,
    TrainedSteps,
    WorkChosen,
    encoded,
)
from tllm.cluster.join_token import TokenRecord
from tllm.cluster.settings import EngineSettings
from tllm.core.errors import ClusterError
from tllm.spec.plan import Plan
from tllm.spec.request import KeptReply, Output, Request, SamplingParams, StreamRecord

PLAN = Plan.parse("pp=2", 4)
REQUEST = Request(id="r", prompt_ids=(1, 2), params=SamplingParams(max_tokens=4, seed=3))
WORK = ReplicatedWork(
    folder="/models/m",
    config="{}",
    plan=PLAN,
    settings=EngineSettings(
        dtype="float32",
        num_pages=4,
        page_size=16,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        threads=1,
        link_seconds=30,
    ),
    load_seconds=1,
    allow_mixed=False,
    prepare_seconds=1,
    lost_after=5,
    policy="replan",
    replicas=3,
    reads=("rows.jsonl",),
)
TRAINED = TrainedSteps(step=12, saved=8, written="box:/run", beginning="0f")
RECORD = StreamRecord(id="reply", body=b"{}", owner="", created=1)


def outputs(*token_ids: int) -> tuple[Output, ...]:
    return tuple(Output(request_id="r", token_ids=(token,)) for token in token_ids)


ALL: tuple[AnyEntry, ...] = (
    ClusterFounded("c", SigningKey(b"certificate", b"key")),
    CoordinatorBegan(1, "h", 7000),
    TokensChanged((TokenRecord(b"\0" * 32, 10.0, 2),)),
    WorkChosen(WORK),
    MembersChanged(("a", "b", "local-0"), ("local-0",)),
    EpochBegan(1, PLAN, ("a", "b")),
    ReplyOpened(RECORD, (REQUEST,)),
    ReplyGrown("reply", 0, outputs(7, 8), is_over=True, error="lost"),
    StepsTrained(TRAINED),
    ClusterEnded("because"),
)


def after(*entries: AnyEntry) -> ReplicatedMachine:
    machine = ReplicatedMachine()
    for entry in entries:
        machine.apply(encoded(entry))
    return machine


def test_every_entry_is_in_the_state_and_in_its_snapshot() -> None:
    machine = after(*ALL)
    state = machine.state
    assert (state.cluster, state.authority) == ("c", SigningKey(b"certificate", b"key"))
    assert (state.term, state.coordinator) == (1, ("h", 7000))
    assert state.tokens == (TokenRecord(b"\0" * 32, 10.0, 2),)
    assert state.work == WORK
    assert (state.members, state.own) == (("a", "b", "local-0"), ("local-0",))
    assert (state.epoch, state.plan, state.ranks) == (1, PLAN, ("a", "b"))
    reply = KeptReply(record=RECORD, requests=(REQUEST,), outputs=outputs(7, 8), is_over=True, error="lost")
    assert state.replies == {"reply": reply}
    assert state.trained == TRAINED
    assert state.ended == "because"
    other = ReplicatedMachine()
    other.restore(machine.snapshot())
    assert other.state == state


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: type(entry).__name__)
def test_an_entry_changes_nothing_when_it_comes_again(entry: AnyEntry) -> None:
    before = after(*ALL[: ALL.index(entry) + 1])
    state = before.state
    before.apply(encoded(entry))
    assert before.state == state


def test_what_is_late_changes_nothing() -> None:
    machine = after(*ALL, EpochBegan(2, PLAN, ("b", "a")), CoordinatorBegan(5, "new", 1))
    state = machine.state
    late = StepsTrained(TrainedSteps(step=11, saved=8)), StepsTrained(TrainedSteps(step=12, saved=0))
    for entry in (EpochBegan(1, PLAN, ("x", "y")), CoordinatorBegan(4, "old", 2), *late):
        machine.apply(encoded(entry))
    assert machine.state == state


def test_outputs_follow_those_before_and_none_is_lost_or_doubled() -> None:
    machine = after(ReplyOpened(RECORD, (REQUEST,)))
    for start, ids in ((0, (1, 2)), (1, (2, 3)), (5, (9,)), (0, (1,)), (3, (4,))):
        machine.apply(encoded(ReplyGrown("reply", start, outputs(*ids))))
    for entry in (ReplyGrown("reply", 4, (), is_over=True, error="lost"), ReplyGrown("reply", 0, outputs(1))):
        machine.apply(encoded(entry))
    reply = machine.state.replies["reply"]
    assert (reply.outputs, reply.is_over, reply.error) == (outputs(1, 2, 3, 4), True, "lost")
    machine.apply(encoded(ReplyGrown("other", 0, outputs(1))))
    machine.apply(encoded(ReplyForgotten("reply")))
    assert machine.state.replies == {}


def test_replies_stand_in_the_order_in_which_they_began() -> None:
    """Whoever takes over takes them up in that order: of those that have ended the oldest gives way first."""
    records = [StreamRecord(id=name, body=b"{}", owner="", created=1) for name in ("a", "b", "c")]
    machine = after(*(ReplyOpened(record, (REQUEST,)) for record in (*records, records[0])))
    machine.apply(encoded(ReplyGrown("b", 0, outputs(1))))
    other = ReplicatedMachine()
    other.restore(machine.snapshot())
    assert list(machine.state.replies) == list(other.state.replies) == ["a", "b", "c"]


def test_bytes_that_are_no_entry_or_no_state_are_refused() -> None:
    machine = ReplicatedMachine()
    for content in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Nothing"}), encoded(ALL[0])[:-1]):
        with pytest.raises(ClusterError, match="cannot be read"):
            machine.apply(content)
    with pytest.raises(ClusterError, match="cannot be read"):
        machine.restore(b"\xc1")
    machine.restore(b"")
    assert machine.state.epoch == 0


def test_a_private_key_is_in_no_text() -> None:
    assert "certificate" not in repr(ALL[0])
    assert "key'" not in repr(after(*ALL).state)
