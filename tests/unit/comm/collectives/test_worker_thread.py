"""One thread that does what it is given, and what becomes of what it is not given in time."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from tllm.comm.collectives.group import solo
from tllm.comm.collectives.worker_thread import WorkerThread
from tllm.core.errors import LinkClosed


def test_work_is_done_in_order_and_hands_over_what_it_gives_or_raises() -> None:
    lane, done = WorkerThread("one"), list[int]()

    def divide(number: int) -> int:
        done.append(number)
        return 6 // number

    futures = [lane.submit(partial(divide, n)) for n in (3, 2, 0, 1)]
    assert [futures[place].result(20) for place in (0, 1, 3)] == [2, 3, 6] and done == [3, 2, 0, 1]
    assert isinstance(futures[2].exception(20), ZeroDivisionError)
    lane.close()


def test_what_has_not_begun_when_it_closes_is_cancelled() -> None:
    lane, begun, goes_on = WorkerThread("one"), threading.Event(), threading.Event()
    first = lane.submit(lambda: (begun.set(), goes_on.wait(20)))
    second = lane.submit(lambda: None)
    second.add_done_callback(lambda _: goes_on.set())  # what runs ends only then, and `close` waits for it
    assert begun.wait(20)
    lane.close()
    assert first.done() and not first.cancelled() and second.cancelled()


def test_a_closed_lane_takes_nothing_more_and_says_so() -> None:
    """It would never be done, and who waits for it would wait for ever."""
    lane = WorkerThread("one")
    lane.submit(lambda: None).result(20)
    lane.close()
    assert lane.submit(lambda: None).cancelled()
    group = solo()
    group.start(group.barrier).wait(20)
    group.close()
    with pytest.raises(LinkClosed, match="had not begun when the group was closed"):
        group.start(group.barrier).wait(20)


def test_whoever_waits_for_cancelled_work_is_woken() -> None:
    """`concurrent.futures.wait` counts a future as done once it was told that it is cancelled."""
    lane, begun, goes_on = WorkerThread("one"), threading.Event(), threading.Event()
    lane.submit(lambda: (begun.set(), goes_on.wait(20)))
    assert begun.wait(20)
    before = lane.submit(lambda: None)
    closing = threading.Thread(target=lane.close, daemon=True)
    closing.start()
    assert wait([before], timeout=20).done, "cancelled by `close`"
    goes_on.set()
    closing.join(20)
    assert wait([lane.submit(lambda: None)], timeout=20).done, "submitted after it"


def test_close_ends_though_the_thread_takes_the_last_work_first() -> None:
    """Between the look whether there is work and the taking of it the thread may have taken it."""
    lane, begun, goes_on, done = WorkerThread("one"), *(threading.Event() for _ in range(3))

    class TakenMeanwhile(SimpleQueue[Any]):
        def empty(self) -> bool:
            is_empty = super().empty()
            self._let_it_be_taken()
            return is_empty

        def get_nowait(self) -> Any:
            self._let_it_be_taken()
            return super().get_nowait()

        def _let_it_be_taken(self) -> None:
            goes_on.set()
            done.wait(20)

    lane._waiting = TakenMeanwhile()
    lane.submit(lambda: (begun.set(), goes_on.wait(20)))
    assert begun.wait(20)
    lane.submit(done.set)
    closing = threading.Thread(target=lane.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
