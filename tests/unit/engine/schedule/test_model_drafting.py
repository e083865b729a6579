"""A draft model drafts as far as pays, ends where it does not, and lookups with a long match go first."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.kits import AlwaysDrafting, EveryDraft, FakeRing, continuation, expected, limits, request
from tllm.engine.schedule.draft_phases import SETTLING, SHORT_PHASE, DraftPhases, PhaseCount
from tllm.engine.schedule.model_drafting import ModelDrafting
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

    assert rate(drafting.length(sequences, (0, 0.0), 8, cost)) == pytest.approx(max(map(rate, range(1, 9))), rel=1e-6)


@pytest.mark.parametrize(("step_seconds", "pays"), [(0.02, True), (0.9, False)])
@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_end_where_they_do_not_pay(step_seconds: float, pays: bool, depth: int, clock: Clock) -> None:
    """A turn takes 0.5; a ring of three batches waits for its first rank, where the draft model runs."""
    model = Oracle(clock, seconds=step_seconds)
    speculation = Speculation(4, model)
    speculation.cost = EveryDraft()
    sequences = [sequence(key) for key in range(depth)]
    with_drafts = []
    for step in range(1200):
        one = sequences[step % depth]
        (draft,) = speculation.propose([one], 100)
        with_drafts.append(bool(draft))
        clock.now += 0.5 / depth
        accepted = [*draft[: step // depth % 3], 0]  # one more on an average
        speculation.record_acceptance(one.key, len(draft), accepted)
    assert not any(with_drafts[: SETTLING + SHORT_PHASE]), "first it is seen what goes without"
    share = sum(with_drafts[600:]) / 600
    assert share > 0.9 if pays else share < 0.1
    assert speculation.model is not None and speculation.model.phases.pays == pays


def test_what_begins_to_pay_is_found_again(clock: Clock) -> None:
    model = Oracle(clock, seconds=5.0)
    speculation, one = Speculation(4, model), sequence()
    speculation.cost = EveryDraft()
    with_drafts = []
    for step in range(6000):
        model.seconds = 5.0 if step < 2000 else 0.01
        (draft,) = speculation.propose([one], 100)
        with_drafts.append(bool(draft))
        clock.now += 1.0
        speculation.record_acceptance(0, len(draft), [*draft, 0])
    assert sum(with_drafts[1000:2000]) < 50 and sum(with_drafts[5000:]) > 900


def test_phases_with_other_numbers_of_sequences_are_not_compared_and_pauses_are_not_counted() -> None:
    phases, now = DraftPhases(), 0.0
    for step in range(400):
        now += 500.0 if step % 10 == 9 else 1.0
        is_drafting = phases.begin_step(8 if phases.is_drafting else 2, now)
        phases.record(9 if is_drafting else 1)
    assert phases._lengths == {False: SHORT_PHASE, True: SHORT_PHASE}
    count = PhaseCount(False)
    for step in range(SETTLING + 21):
        count.begin_step(1, 1000.0 * (step > SETTLING + 10) + step)
        count.record(1)
    assert count.seconds == 19.0 and count.tokens == 21


def test_no_prompt_is_computed_that_gets_no_drafts() -> None:
    oracle, one_token = Oracle(), Sequence(7, request("one", [1, 2, 3], 1))
    ModelDrafting(oracle).prepare([one_token])
    assert not oracle.held
    ModelDrafting(oracle).prepare([one_token, sequence(2)])
    assert oracle.held == {2}


def test_a_long_match_is_looked_up_and_the_model_is_not_asked() -> None:
    model = Oracle()
    speculation = Speculation(4, model)
    assert speculation.model is not None
    speculation.cost, speculation.model.phases = EveryDraft(), AlwaysDrafting()
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
    assert scheduler.speculation is not None and scheduler.speculation.model is not None
    scheduler.speculation.cost, scheduler.speculation.model.phases = EveryDraft(), AlwaysDrafting()
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
