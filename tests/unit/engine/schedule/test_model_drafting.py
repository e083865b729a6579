"""A draft model drafts as far as pays, ends where it does not, and lookups with a long match go first."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.kits import EveryDraft, FakeRing, continuation, expected, limits, request
from tllm.engine.schedule.model_drafting import MOST_RETRY_AFTER, PLAIN_EVERY, RETRY_AFTER, ModelDrafting
from tllm.engine.schedule.proposer import DraftedSequence
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.schedule.sequence import Sequence
from tllm.engine.schedule.speculative_decoding import Speculation
from tllm.engine.schedule.step_cost import StepCost


class Clock:
    """Time that passes only while a draft model computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Oracle:
    """A draft model that knows the fake model's next token, or says 49; each step takes `seconds`."""

    def __init__(self, clock: Clock | None = None, seconds: float = 0.0, is_right: bool = True) -> None:
        self.clock, self.seconds, self.is_right = clock or Clock(), seconds, is_right
        self.held: set[int] = set()
        self.calls: list[list[int]] = []

    def prepare(self, sequences: Sequences[DraftedSequence]) -> None:
        self.held |= {one.key for one in sequences}

    def propose(self, sequences: Sequences[DraftedSequence], counts: Sequences[int]) -> list[list[int]]:
        self.calls.append(list(counts))
        self.clock.now += self.seconds * max(counts, default=0)
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            ids = list(sequence.token_ids)
            for _ in range(count):
                ids.append(continuation(ids) if self.is_right else 49)
            drafts.append(ids[len(sequence.token_ids) :])
        return drafts

    def release(self, key: int) -> None:
        self.held.discard(key)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("tllm.engine.schedule.model_drafting.time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def cost_of(plain: float, row: float = 0.0) -> StepCost:
    """One sequence's step takes `plain`, and each row more takes `row`."""
    cost = StepCost()
    for rows in (1, 3, 5):
        cost.record(rows, plain + row * (rows - 1), rows > 1)
    return cost


def sequence(key: int = 0) -> Sequence:
    return Sequence(key, request(f"r{key}", [1, 2, 3 + key], 40))


@given(st.floats(0.02, 0.98), st.floats(0.0, 0.02), st.floats(0.0, 2.0), st.integers(1, 3))
def test_as_many_are_drafted_as_give_the_most_tokens_a_second(
    chance: float, row: float, step: float, count: int
) -> None:
    drafting, sequences = ModelDrafting(Oracle()), [sequence(key) for key in range(count)]
    drafting._step_seconds = {count: step}
    for one in sequences:
        drafting.rates[one.key] = chance
    cost = StepCost()
    for rows in (count, count + 2, count + 4):
        cost.record(rows, 1.0 + row * rows, rows > count)

    def rate(drafted: int) -> float:
        return sum(chance**i for i in range(1 + drafted)) / (1.0 + row * count * (1 + drafted) + step * drafted)

    assert rate(drafting.length(sequences, (0, 0.0), 8, cost)) == pytest.approx(max(map(rate, range(9))), rel=1e-6)


def test_drafts_end_where_they_do_not_pay_and_are_tried_more_and_more_rarely(clock: Clock) -> None:
    model = Oracle(clock, seconds=0.9)  # a step of the target takes 1.0
    speculation = Speculation(5, model)
    speculation.cost, one, tried = cost_of(1.0), sequence(), list[int]()
    for step in range(4 * RETRY_AFTER + 4):
        (draft,) = speculation.propose([one], 100)
        tried += [step] if draft else []
        speculation.record_acceptance(0, len(draft), [49] * (1 + len(draft)))
    assert tried[0] == 0, "the first has no price yet"
    assert tried[1:] == [RETRY_AFTER, 3 * RETRY_AFTER]
    drafting = speculation.model
    assert drafting is not None
    for _ in range(20):
        while not drafting.length([one], (0, 0.0), 5, speculation.cost):
            pass
    assert drafting._retry_after == MOST_RETRY_AFTER
    model.seconds, drafting._step_seconds = 0.01, {1: 0.01}
    drafting.rates[0] = 0.9
    assert drafting.length([one], (0, 0.0), 5, speculation.cost) == 5 and drafting._retry_after == RETRY_AFTER


def test_a_step_without_drafts_is_measured_first_and_again(clock: Clock) -> None:
    speculation, one = Speculation(4, Oracle(clock, seconds=0.01)), sequence()
    assert speculation.propose([one], 100) == [[]] and speculation.draft_seconds == 0.0
    speculation.cost = cost_of(1.0)
    empty = 0
    for _ in range(2 * (PLAIN_EVERY + 1)):
        (draft,) = speculation.propose([one], 100)
        empty += not draft
        if draft:
            assert speculation.draft_seconds == pytest.approx(0.04)
            one.token_ids += draft
            speculation.record_acceptance(0, len(draft), [*draft, 0])
            del one.token_ids[3:]
    assert empty == 2


def test_a_long_match_is_looked_up_and_the_model_is_not_asked() -> None:
    model = Oracle()
    speculation = Speculation(4, model)
    speculation.cost = EveryDraft()
    repeats = Sequence(0, request("repeats", [1, 2, 3, 4, 5, 6, 7] * 2, 40))
    new = sequence(1)
    found, drafted = speculation.propose([repeats, new], 100)
    assert found == [1, 2, 3, 4] and len(drafted) == 4
    assert model.calls == [[4]], "for one sequence alone"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_right", [True, False])
def test_replies_are_those_without_drafts_also_after_preemption(depth: int, is_right: bool) -> None:
    model = Oracle(is_right=is_right)
    scheduler = Scheduler(limits(num_speculative_tokens=3), depth, (), model)
    assert scheduler.speculation is not None
    scheduler.speculation.cost = EveryDraft()
    asked = [request(f"r{i}", [10 + i, 20 + i, 30 + i] * 3, 20) for i in range(4)]
    ring = FakeRing(scheduler, continuation)
    for one in asked:
        scheduler.add(one)
    outputs = []
    while scheduler.has_work or ring.in_flight:
        outputs += ring.step()
        assert model.held <= {sequence.key for sequence in scheduler.running}, "who waits holds nothing"
    for one in asked:
        got = [token for out in outputs if out.request_id == one.id for token in out.token_ids]
        assert (got, "length") == expected(one)
    stats = scheduler.stats()
    assert stats["preemptions"] > 0 and stats["draft_model_steps"] > 0 and not model.held
    assert stats["accepted_tokens"] > 0.5 * stats["draft_tokens"] if is_right else stats["accepted_tokens"] < 5
