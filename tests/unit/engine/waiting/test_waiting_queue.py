"""Who begins next: order of arrival, priorities that starve nobody, deadlines, and what tenants are charged."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.engine.kits import FakeRing, expected, limits, request
from tllm.core.errors import RequestError
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.waiting import fair_share
from tllm.engine.waiting.fair_share import OUTPUT_COST, PROMPT_COST, VirtualTokenCounters
from tllm.engine.waiting.waiting_queue import OLDEST_TURN, WaitingQueue
from tllm.spec.request import Request, Scheduling


@dataclass(eq=False)
class One:
    key: int
    request: Request


def one(key: int, tenant: str = "", *, output_ids: tuple[int, ...] = (), **terms: float) -> One:
    scheduling = Scheduling(tenant=tenant, **terms)  # type: ignore[arg-type]
    made = request(f"r{key}", 3)
    return One(
        key,
        Request(
            id=made.id, prompt_ids=made.prompt_ids, params=made.params, output_ids=output_ids, scheduling=scheduling
        ),
    )


def queue(*ones: One) -> WaitingQueue[One]:
    made = WaitingQueue[One](lambda: 0.0)
    for waiting in ones:
        made.add(waiting)
    return made


def keys(waiting: WaitingQueue[One]) -> list[int]:
    return [one.key for one in waiting]


def drained(waiting: WaitingQueue[One], cost: int = 1) -> list[int]:
    """Keys in the order in which they begin, each with so many tokens to compute."""
    begun = []
    while len(waiting):
        sequence = next(iter(waiting))
        waiting.begin(sequence, cost)
        begun.append(sequence.key)
    return begun


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    assert drained(queue(*(one(key) for key in range(20)))) == list(range(20))


def test_what_lost_its_place_keeps_its_place_in_order_of_arrival() -> None:
    first, second, third = (one(key) for key in range(3))
    waiting = queue(first, second, third)
    waiting.begin(first, 1)
    waiting.put_back(first)
    assert keys(waiting) == [0, 1, 2]


def test_a_single_request_waits_for_none_of_another_tenants_500() -> None:
    waiting = queue(*(one(key, "many") for key in range(500)))
    for _ in range(3):
        waiting.begin(next(iter(waiting)), 10)
    waiting.add(one(500, "single"))
    assert next(iter(waiting)).key == 500 or waiting.shares.counters["single"] == waiting.shares.counters["many"]
    waiting.begin(next(iter(waiting)), 10)
    assert 500 not in keys(waiting) or next(iter(waiting)).key == 500


def test_tenants_take_turns_by_weight() -> None:
    ones = [one(key, "a", weight=3.0) for key in range(40)] + [one(key, "b") for key in range(40, 80)]
    begun = drained(queue(*ones))[:40]
    assert sum(key < 40 for key in begun) == 30


def test_a_tenant_that_paused_is_lifted_and_saves_nothing_up() -> None:
    counters = VirtualTokenCounters()
    counters.arrive("busy", ())
    counters.charge("busy", 100.0, 1.0)
    counters.arrive("new", {"busy"})
    assert counters.counters["new"] == 100.0
    counters.charge("new", 1.0, 0.5)
    assert counters.counters["new"] == 102.0, "half the weight costs twice"
    counters.last = "new"
    counters.arrive("third", ())
    assert counters.counters["third"] == 102.0, "an empty queue lifts to whoever left it last"
    counters.arrive("new", {"third"})
    assert counters.counters["new"] == 102.0, "nobody is set back"


def test_names_of_tenants_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "MAX_IDLE_TENANTS", 10)
    counters = VirtualTokenCounters()
    for number in range(1000):
        counters.arrive(f"t{number}", {"t0"} if number else ())
        counters.charge(f"t{number}", number, 1.0)
    assert len(counters.counters) == 12 and {"t0", "t999", "t995"} <= counters.counters.keys()


def test_lower_priorities_begin_earlier_and_tenants_share_within_one() -> None:
    waiting = queue(one(0, "a", priority=5), one(1, "a"), one(2, "a"), one(3, "b"), one(4, "b", priority=-1))
    # b has had one token when a has had none, and as much as a after that.
    assert drained(waiting) == [4, 1, 2, 3, 0]


def test_each_eighth_is_the_oldest_whatever_its_priority() -> None:
    waiting = queue(one(0, priority=9), one(1, priority=9))
    begun: list[int] = []
    for key in range(2, 50):  # newer and more urgent ones never end
        waiting.add(one(key))
        waiting.add(one(key + 100))
        sequence = next(iter(waiting))
        waiting.begin(sequence, 1)
        begun.append(sequence.key)
    assert begun.index(0) == OLDEST_TURN - 1 and begun.index(1) == 2 * OLDEST_TURN - 1


def test_the_oldest_is_named_once() -> None:
    waiting = queue(one(0, priority=1), one(1))
    for key in range(2, OLDEST_TURN + 1):
        waiting.add(one(key, priority=-1))
        waiting.begin(next(iter(waiting)), 1)
    assert keys(waiting) == [0, 1]


def test_deadlines_end_what_has_not_begun_and_nothing_else() -> None:
    now = [0.0]
    waiting = WaitingQueue[One](lambda: now[0])
    late, begun, gone, resumed = (one(key, max_queue_seconds=2.0) for key in range(4))
    resumed = one(3, output_ids=(7,), max_queue_seconds=2.0)
    for sequence in (late, begun, gone, resumed, one(4)):
        waiting.add(sequence)
    waiting.begin(begun, 3)
    waiting.remove(gone)
    assert len(waiting._deadlines) == 1, "nothing is kept of what waits no longer"
    waiting.put_back(begun)  # it was preempted
    now[0] = 1.999
    assert waiting.expired() == []
    now[0] = 2.0
    assert waiting.expired() == [late]
    assert waiting.expired() == [], "each is named once"
    waiting.remove(late)
    now[0] = 100.0
    assert waiting.expired() == [], "what has begun, or gave out tokens before a loss, has no deadline"


def test_a_request_that_expires_ends_as_such_and_others_as_they_would() -> None:
    now = [0.0]
    scheduler = Scheduler(limits(max_num_seqs=1), clock=lambda: now[0])
    ring = FakeRing(scheduler)
    first, second, third = request("first", 4), request("second", 4), request("third", 5)
    patient = Request(
        id="second",
        prompt_ids=second.prompt_ids,
        params=second.params,
        scheduling=Scheduling(max_queue_seconds=1.0),
    )
    for asked in (first, patient, third):
        scheduler.add(asked)
    ring.step()
    now[0] = 1.0
    expired = scheduler.expire()
    assert [(output.request_id, output.finish_reason) for output in expired] == [("second", "expired")]
    outputs = ring.run()
    third_ids = [token for output in outputs if output.request_id == "third" for token in output.token_ids]
    assert third_ids == expected(third)[0]
    assert not scheduler.has_work and "second" not in {output.request_id for output in outputs}


def test_what_is_computed_is_charged_and_what_is_found_is_not() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1))
    ring = FakeRing(scheduler)
    asked = request("a", list(range(1, 10)), max_tokens=3)
    scheduler.add(asked)
    ring.run()
    assert scheduler.waiting.shares.counters[""] == 9 * PROMPT_COST + 3 * OUTPUT_COST
    scheduler.add(Request(id="b", prompt_ids=asked.prompt_ids, params=asked.params))
    ring.run()
    found = scheduler.pages.stats()["prefix_hits"]
    assert found == 8, "two pages of four tokens"
    assert scheduler.waiting.shares.counters[""] == 9 * PROMPT_COST + 3 * OUTPUT_COST + PROMPT_COST + 3 * OUTPUT_COST


@pytest.mark.parametrize(
    "wrong", [{"weight": 0.0}, {"weight": float("inf")}, {"priority": 2**31}, {"max_queue_seconds": -1.0}]
)
def test_terms_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    made = one(0, "", **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        Scheduler(limits()).add(made.request)


def test_who_gave_way_to_younger_ones_does_so_no_more() -> None:
    waiting, patient = queue(), one(0, priority=9)
    running = [patient, one(1), one(2)]
    assert waiting.preempt(running) is patient and [other.key for other in running] == [1, 2]
    running.insert(0, patient)  # it begins again
    for key in range(3, 40):
        running.append(one(key, priority=key % 3))
        assert waiting.preempt(running) is not patient
    alone = [patient]
    assert waiting.preempt(alone) is patient and not alone
    waiting.forget(patient)
    assert waiting.preempt([patient, one(50)]) is patient, "its place among those that are spared has gone with it"
