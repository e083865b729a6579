"""`WaitingRanks`: the other ranks of a run, which wait for rank 0 while it waits for programs elsewhere.

It tells them now and then that it still does, by empty messages that whoever receives passes over. So their links'
seconds count its silence and not its wait, and a rank 0 that says nothing is missed as soon as before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from tllm.comm.links.link import Link

STILL_SECONDS = 5.0
"""From one such message to the next."""

LIMIT = 1 << 20
"""Bytes of a message, at most, where no other limit is given."""

Still = Callable[[], object]
"""still(): this rank still waits for an answer. Called often, by the thread that sends on the links."""


def nobody() -> None:
    """A `Still` where nobody waits for this rank."""


class WaitingRanks:
    """`links` lead from rank 0 to every other rank, by its number; on these, the one link is from rank 0. They are
    `Groups.data`, on which nothing travels but messages as a whole, received by `heard`."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links, self._told = links, -math.inf

    def still(self) -> None:
        """On rank 0: tell the others that it waits, unless it did so within STILL_SECONDS. LinkError where one is
        lost."""
        now = time.monotonic()
        if now - self._told >= STILL_SECONDS:
            self._told = now
            self._send(b"")

    def broadcast(self, payload: bytes | None, limit: int = LIMIT) -> bytes:
        """Rank 0's `payload`, which is not empty, on every rank; the others pass None, and wait for as long as rank 0
        says that it waits."""
        if payload is None:
            return heard(self._links, limit)
        assert payload, "an empty message says that another comes"
        self._send(payload)
        return payload

    def meet(self) -> None:
        """Every rank calls it: the others go on when rank 0 does."""
        self.broadcast(None if 0 in self._links else b"on")

    def _send(self, payload: bytes) -> None:
        for link in self._links.values():
            link.send_bytes(payload)


def heard(links: Mapping[int, Link], limit: int) -> bytes:
    """On another rank: the next message of rank 0 that is not empty. LinkTimeout where it says nothing."""
    while not (content := links[0].recv_bytes(limit)):
        pass
    return content
