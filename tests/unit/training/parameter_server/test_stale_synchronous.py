from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tllm.training.parameter_server.stale_synchronous import ASYNCHRONOUS, StaleSynchronousClocks


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_nobody_reads_what_is_too_old_and_somebody_may_always_go_on(
    replicas: int, max_staleness: int, data: st.DataObject
) -> None:
    clocks, taken = StaleSynchronousClocks(replicas, max_staleness), [0] * replicas
    for replica in data.draw(st.lists(st.integers(0, replicas - 1), max_size=40)):
        ahead = taken[replica] - min(taken)
        assert clocks.may_read(taken[replica] + 1) == (ahead <= max_staleness)
        if ahead <= max_staleness:
            taken[replica] += 1
            clocks.push(replica, taken[replica])
        assert clocks.pushed == tuple(taken)
        assert clocks.may_read(min(taken) + 1), "the slowest never waits"


def test_asynchronous_waits_for_nobody() -> None:
    clocks = StaleSynchronousClocks(2, ASYNCHRONOUS)
    for step in range(1, 9):
        clocks.push(0, step)
    assert clocks.may_read(9)
    clocks.leave(1)
    assert clocks.pushed == (8, 8)


def test_nobody_waits_for_one_that_left() -> None:
    clocks = StaleSynchronousClocks(2, 0)
    clocks.push(0, 1)
    assert not clocks.may_read(2)
    clocks.leave(1)
    assert clocks.may_read(2)


def test_a_run_that_goes_on_has_its_steps_behind_it() -> None:
    clocks = StaleSynchronousClocks(2, 1)
    clocks.start(7)
    assert clocks.pushed == (7, 7) and clocks.may_read(9) and not clocks.may_read(10)
    assert clocks.follows(0, 8) and not clocks.follows(0, 7) and not clocks.follows(0, 9)
