"""What a replica does with the connections of others."""

from __future__ import annotations

import asyncio
import time

import pytest

from tllm.cluster.channel import Channel, TimedReader
from tllm.cluster.consensus.consensus_links import SILENT_SECONDS
from tllm.cluster.consensus.replica import Silence


class Quiet(Channel):
    """A channel without a socket, on which bytes came so many seconds ago."""

    def __init__(self, seconds: float) -> None:
        self._reader = reader = TimedReader(1, asyncio.get_running_loop())
        reader.heard = time.monotonic() - seconds
        self.is_over = False

    def abort(self) -> None:
        self.is_over = True


@pytest.mark.parametrize(("seconds", "is_over"), [(0.0, False), (SILENT_SECONDS + 1, True)])
def test_a_connection_that_was_silent_before_anybody_watched_it_ends_alone(seconds: float, is_over: bool) -> None:
    """As after a handshake during which this process was suspended. What its watch raises would end the replica."""

    async def scene() -> bool:
        channel = Quiet(seconds)
        silence = Silence(channel)
        await asyncio.sleep(0)
        silence.cancel()
        return channel.is_over

    assert asyncio.run(scene()) == is_over
