"""`Replay`: a reply that is made once more of the outputs that are kept of it, from an event that its client names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from tllm.core.errors import RequestError
from tllm.server.stored.stream_store import TakenStream
from tllm.spec.request import Output


class Replay:
    """Gives the outputs of a stream that was taken up, and notes when those are read that were there before, if there
    may be more. A stream that is over tells by its end.

    With `until_now` there are no others.
    """

    def __init__(self, taken: TakenStream, until_now: bool = False) -> None:
        self.has_caught_up = False
        self.record = taken.record
        self._taken, self._until_now = taken, until_now

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """For the reply's job."""
        number, seen = 0, self._taken.seen
        async with aclosing(self._taken.outputs) as outputs:
            self.has_caught_up = not seen and not self._taken.is_over
            if self._until_now and self.has_caught_up:
                return
            async for output in outputs:
                yield output
                number += 1
                self.has_caught_up = number >= seen and not self._taken.is_over
                if self._until_now and self.has_caught_up:
                    return

    async def events_after(
        self, events: AsyncGenerator[bytes, None], after: int, param: str
    ) -> AsyncGenerator[bytes, None]:
        """The events with higher numbers than `after`, which the client has; they count from 0.

        RequestError where the stream never had such an event: it ended before, or is not that far.
        """
        last = -1
        async with aclosing(events):
            async for event in events:
                if last < after and self.has_caught_up:
                    break
                last += 1
                if last > after:
                    yield event
        if last < after:
            raise RequestError(f"{param} is {after}, and the last event so far is {last}", param=param)


async def numbered(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same events, each with its number as its `id`, which clients send as `Last-Event-ID`."""
    number = 0
    async with aclosing(events):
        async for event in events:
            yield b"id: %d\n" % number + event
            number += 1
