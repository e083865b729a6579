"""Mean times, on a clock of the test's own."""

from __future__ import annotations

import math
import threading

import pytest

from tllm.core.timing import AwakeClock, Deadline, mean_seconds_each, wait_awake


class Machine:
    """A clock that work moves on: twice as far while the machine is held back, between `slow` and `fast`."""

    def __init__(self, slow: float, fast: float) -> None:
        self.now, self.slow, self.fast = 0.0, slow, fast
        self.calls = 0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.calls += 1
        self.now += seconds * (2 if self.slow <= self.now < self.fast else 1)


def test_a_machine_that_is_held_back_for_a_while_slows_all_alike() -> None:
    machine = Machine(2.0, 5.0)
    works = [lambda: machine.work(0.01), lambda: machine.work(0.03)]
    one, three = mean_seconds_each(works, 10.0, machine.clock)
    assert three / one == pytest.approx(3, rel=0.03)
    assert 0.0115 < one < 0.012, "the mean, and not what it takes at its best"
    assert machine.now == pytest.approx(10.0, rel=0.03)


def test_what_takes_longer_than_there_is_time_is_measured_once() -> None:
    machine = Machine(0.0, 0.0)
    assert mean_seconds_each([lambda: machine.work(7.0)], 1.0, machine.clock) == [7.0]
    assert machine.calls == 2, "and once before, to warm up"


def test_a_clock_stands_still_while_its_process_does() -> None:
    now = 100.0
    clock = AwakeClock(1.0, lambda: now)
    told = []
    for passed in (0.5, 2.0, 3600.0, 0.5, 2.1, 1.0):
        now += passed
        told.append(clock())
    assert told == pytest.approx([100.5, 102.5, 102.5, 103.0, 103.0, 104.0])


def test_who_waits_looks_at_the_clock_in_between() -> None:
    clock = AwakeClock(1.0, lambda: 100.0)
    assert [clock.turn(until) for until in (100.25, 107.0, 100.0, 99.0)] == [0.25, 1.0, 0.0, 0.0]
    assert clock.turn(math.inf) == math.inf, "who waits for ever need not"


def test_a_deadline_is_not_moved_nearer_by_a_pause() -> None:
    now = 100.0
    deadline = Deadline(3.0, AwakeClock(1.0, lambda: now))
    turns = []
    for passed in (0.5, 3600.0, 2.0, 0.25, 0.25):
        now += passed
        turns.append(deadline.turn())
    assert turns == [1.0, 1.0, 0.5, 0.25, 0.0]


def test_waiting_for_a_condition_ends_when_it_holds_or_time_is_up() -> None:
    changed, done = threading.Condition(), list[bool]()

    def end() -> None:
        with changed:
            done.append(True)
            changed.notify_all()

    with changed:
        assert not wait_awake(changed, lambda: done, 0.01)
        threading.Timer(0.01, end).start()
        assert wait_awake(changed, lambda: done, math.inf)
