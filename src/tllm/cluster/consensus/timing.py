"""How long replicas wait for each other, and for how long a leader may take itself for the only one."""

from __future__ import annotations

import time
from dataclasses import dataclass

CLOCK_DRIFT = 0.02
"""Clocks of two replicas may run fast or slow by so much. Those of machines do so by less than a thousandth (NTP slews
by 500 ppm at most); the rest is for virtual machines."""


@dataclass(frozen=True)
class RaftTiming:
    """All in seconds of a replica's own clock.

    heartbeat: a leader is heard at least this often.
    election: a follower waits at least so long after it heard a leader before it votes for another or stands itself.
    spread: each time it waits as much more as is drawn below this part of it, so that not all stand at once.

    A process that a busy machine does not let run for `election` loses its lead, so that this is as long as a takeover
    within ten seconds allows. It is half of the silence after which a node is lost, if that is not set.
    """

    heartbeat: float = 0.4
    election: float = 2.5
    spread: float = 0.5

    @property
    def lease(self) -> float:
        """How long after it sent what a majority has answered a leader is the only one: they wait `election` by a
        clock that may be fast, and it counts by one that may be slow."""
        return self.election * (1 - CLOCK_DRIFT) / (1 + CLOCK_DRIFT)


def boot_clock() -> float:
    """Seconds by a clock that is never set and, on Linux, goes on while the machine is suspended.

    `time.monotonic` stands still then, and a machine that wakes would still believe in its lease.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
