"""Thousands of schedules of bad networks, clocks and ends of processes, in each of which every rule holds."""

from __future__ import annotations

import pytest

from tests.support.consensus.simulated_replicas import TICK, SimulatedReplicas, place
from tllm.cluster.consensus import raft_log

SCHEDULES = 200
MANY = 20_000


@pytest.fixture(autouse=True)
def _short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short schedule has many snapshots and messages."""
    monkeypatch.setattr(raft_log, "COMPACT_ENTRIES", 5)
    monkeypatch.setattr(raft_log, "KEPT_ENTRIES", 2)
    monkeypatch.setattr(raft_log, "BATCH_ENTRIES", 1)


def play(seeds: range) -> tuple[int, int, int]:
    """Steps, operations of clients and terms with a leader, in all."""
    steps = operations = leaders = 0
    for seed in seeds:
        schedule = SimulatedReplicas(seed, size=3 + 2 * (seed % 2))
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        steps += schedule.steps
        operations += len(schedule.history)
        leaders += len(schedule.rules.leaders)
    return steps, operations, leaders


@pytest.mark.timeout(300)
def test_every_rule_holds_in_every_schedule() -> None:
    steps, operations, leaders = play(range(SCHEDULES))
    print(f"schedules 0 to {SCHEDULES - 1}: {steps} steps, {operations} operations, {leaders} terms with a leader")
    assert leaders > 1.5 * SCHEDULES, "leaders are lost and elected"
    assert operations > 15 * SCHEDULES, "clients get something done"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_rule_holds_in_many_more_schedules() -> None:
    play(range(SCHEDULES, MANY))


def test_a_seed_gives_the_same_schedule_again() -> None:
    first, again = SimulatedReplicas(7), SimulatedReplicas(7)
    first.run()
    again.run()
    assert (first.steps, first.history) == (again.steps, again.history)


def test_others_go_on_without_the_first_of_them_which_lets_another_lead() -> None:
    """All are cut off from each other for a while. If the first is elected then, whose process was deposed and has no
    nodes any more, it gives the lead away at once (`find_successor`), and no rule is broken by that."""
    was_elected = 0
    for seed in range(30):
        schedule = SimulatedReplicas(seed)
        first = schedule.processes[place(0).id]
        schedule.mend()
        schedule.until(5.0)
        assert first.raft.leadership is not None and len(first.raft.log.configuration) == 3
        schedule.isolate()
        schedule.until(10.0)
        assert all(one.raft.leadership is None for one in schedule.processes.values())
        schedule.mend()
        while schedule.now < 20.0:
            schedule.until(schedule.now + TICK)
            if first.raft.leadership is not None:
                was_elected += 1
                first.raft.hand_over(first.clock(schedule.now))
        schedule.check_progress()
        assert first.raft.leadership is None
    assert was_elected, "the first is elected in some of them"
