"""The ring that the engine runs, played: against every rule applied again and again, and against the planner's turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.planner.cost.serving_load import ServingFacts, ServingLoad
from tllm.planner.simulate.ring import RingStage, play_ring

numbers = st.integers(0, 6)
stages_of = st.lists(st.builds(RingStage, st.integers(1, 6), numbers, numbers), min_size=1, max_size=5)


def relaxed(stages: list[RingStage], batches: int, turns: int) -> dict[tuple[int, int, int], float]:
    """When each (turn, batch, stage) stops, by applying every rule to all until nothing moves."""
    keys = [(t, b, s) for t in range(turns) for b in range(batches) for s in range(len(stages))]
    stops, came = dict.fromkeys(keys, 0.0), dict.fromkeys(keys, 0.0)
    while True:
        before = dict(stops), dict(came)
        for t, b, s in keys:
            served = [(t, b - 1, s) if b else (t - 1, batches - 1, s)]
            input_of = (t, b, s - 1) if s else (t - 1, b, len(stages) - 1)
            free = [stops[one] for one in served if one in stops]
            start = max([0.0, *free, came.get(input_of, 0.0)])
            stops[t, b, s] = start + stages[s].work
            sent = [came[one] - stages[s].latency for one in served if one in came]
            came[t, b, s] = max([stops[t, b, s], *sent]) + stages[s].sending + stages[s].latency
        if (stops, came) == before:
            return stops


@given(stages_of, st.integers(1, 4), st.integers(1, 4))
def test_equals_the_slow_relaxation(stages: list[RingStage], batches: int, turns: int) -> None:
    ring, slow = play_ring(stages, batches, turns), relaxed(stages, batches, turns)
    played = {(one.round, one.batch, s): one.stop for s, row in enumerate(ring.spans) for one in row}
    assert played == slow


@given(stages_of, st.integers(1, 5))
def test_a_turn_takes_what_the_planner_says(stages: list[RingStage], batches: int) -> None:
    """Once begun: the longer of a batch's way round and all batches on the slowest stage or wire."""
    load = ServingLoad(len(stages), ServingFacts("float32", concurrency=batches))
    total = sum(one.work + one.sending + one.latency for one in stages)
    slowest = max(max(one.work, one.sending) for one in stages)
    some, more = (play_ring(stages, load.batches, turns).total for turns in (20, 30))
    assert more - some == 10 * load.step_seconds(total, slowest)


def test_as_many_batches_as_stages_keep_them_all_busy() -> None:
    ring = play_ring([RingStage(2.0)] * 4, 4, 100)
    assert ring.bubble == pytest.approx(3 / 403)
    assert ring.busy == (800.0,) * 4
    assert play_ring([RingStage(2.0)] * 4, 1, 100).bubble == pytest.approx(0.75), "one at a time: three wait"
