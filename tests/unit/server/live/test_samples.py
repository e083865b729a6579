from __future__ import annotations

import pytest

from tllm.server.live.samples import ClusterEvent, LatencySummary, NumberedLog


def test_a_summary_names_latencies_that_did_occur() -> None:
    assert LatencySummary.of([]) is None
    assert LatencySummary.of([0.25]) == LatencySummary(1, 0.25, 0.25, 0.25)
    hundred = [number / 100 for number in range(1, 101)]
    assert LatencySummary.of(hundred[::-1]) == LatencySummary(100, 0.50, 0.95, 1.0)


def test_a_log_keeps_the_newest_and_gives_what_is_new() -> None:
    log = NumberedLog[ClusterEvent](3)
    for number in range(5):
        log.append(ClusterEvent(number, 0.0, "info", str(number)))
    assert [event.number for event in log.after(-1)] == [2, 3, 4]
    assert [event.number for event in log.after(3)] == [4]
    assert log.after(4) == log.after(99) == []
    with pytest.raises(AssertionError):
        log.append(ClusterEvent(7, 0.0, "info", "a number is left out"))
