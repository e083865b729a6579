"""A process that stood still itself, as one that somebody suspends, does not take that for another's silence."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tllm.comm.links import shared_memory as memory_module
from tllm.comm.links import tcp_link as module
from tllm.comm.links.shared_memory import SharedMemory
from tllm.comm.links.tcp_link import ReceiveBuffer
from tllm.core.errors import LinkTimeout


class Clock:
    """One that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 1e-4
        return self.now


class Sleeper:
    """Waits as `poll` does, and oversleeps by what is left of `late`; `then` is done before it looks again."""

    def __init__(self, clock: Clock, late: list[float], then: Callable[[], object]) -> None:
        self.clock, self.late, self.then = clock, late, then

    def poll(self, milliseconds: float) -> list[object]:
        if not milliseconds:
            return []
        self.clock.now += milliseconds / 1000 + (self.late.pop(0) if self.late else 0.0)
        self.then()
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for one in (module, memory_module):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=made.monotonic, sleep=time.sleep))
    return made


def test_a_link_waits_on_after_a_pause_of_its_own_process(clock: Clock) -> None:
    """After Ctrl-Z and `fg` each rank found that the others had sent nothing for longer than they may."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        receiver = ReceiveBuffer(ours)
        receiver._readable = Sleeper(clock, [3600.0], lambda: theirs.send(b"here"))  # type: ignore[assignment]
        memory = bytearray(4)
        assert receiver.read(memoryview(memory), 4, clock.now + 30.0) == 4 and memory == b"here"


@pytest.mark.parametrize(("late", "seconds"), [([], 30.0), ([1.0], 31.0), ([3600.0], 3635.0)])
def test_a_peer_that_sends_nothing_is_still_told_of(clock: Clock, late: list[float], seconds: float) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        receiver = ReceiveBuffer(ours)
        receiver._readable = Sleeper(clock, late, lambda: None)  # type: ignore[assignment]
        with pytest.raises(TimeoutError):
            receiver.read(memoryview(bytearray(4)), 4, clock.now + 30.0)
    assert clock.now == pytest.approx(100.0 + seconds, abs=0.1)


@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_sum_in_memory_does_not_count_its_own_pause(clock: Clock, is_suspended: bool) -> None:
    link: Any = SimpleNamespace(source=1, target=0, is_over=False)
    there: Any = SimpleNamespace(_recv={1: link}, deadline=30.0, turns=0)

    def has_come(rank: int, number: int) -> bool:
        there.turns += 1
        clock.now += 3600.0 if is_suspended and there.turns == 5 else 1.0
        return bool(there.turns == 20 and is_suspended)

    there._has_come = has_come
    if is_suspended:
        SharedMemory._wait_for(there, 1, 0)
    else:
        with pytest.raises(LinkTimeout, match="rank 1 sent nothing to rank 0 within 30 s"):
            SharedMemory._wait_for(there, 1, 0)
