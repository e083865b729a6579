"""`EngineLink`: a node's connection to the coordinator, as the thread of the node's HTTP server uses it.

The channel belongs to the control thread's event loop, the HTTP server to another one: what is asked in one is sent in
the other, and answers come back the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tllm.cluster.channel import Channel, Gone
from tllm.cluster.messages import Message
from tllm.core.errors import ClusterError, TllmError

ASK_SECONDS = 10.0
"""How long the coordinator may take for an answer that it has at hand."""


class EngineLink:
    """`attach` and `detach` are the control thread's, the rest is the HTTP server's.

    While there is no coordinator everything fails with `Gone`. Once it `is_closed` there will be none.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._channel: Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, channel: Channel) -> None:
        """Ask over this channel from now on."""
        self._loop, self._channel = asyncio.get_running_loop(), channel

    def detach(self) -> None:
        """The coordinator is lost. What was asked over its channel ends with that."""
        self._channel = None

    @property
    def is_attached(self) -> bool:
        """Whether there is a coordinator."""
        return self._channel is not None

    async def ask(self, message: Message) -> Any:
        """A question that has one answer."""
        async with aclosing(self.answers(message, ASK_SECONDS)) as answers:
            async for answer in answers:
                return answer
        raise ClusterError("the coordinator answered nothing")

    async def answers(self, message: Message, deadline: float = math.inf) -> AsyncGenerator[Any, None]:
        """A question that has many; each may take so long. Closing this reads no further."""
        channel, loop = self._channel, self._loop
        if channel is None or loop is None or loop.is_closed():
            raise Gone("this node has no coordinator at the moment", "ask again, or ask another node")
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()

        def put(answer: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the HTTP server has ended, and its loop with it
                here.call_soon_threadsafe(arrived.put_nowait, answer)

        async def carry() -> None:
            try:
                async with aclosing(channel.stream(message, deadline)) as stream:
                    async for answer in stream:
                        put(answer)
            except TllmError as error:
                put(error)
            finally:
                put(None)  # also where the control thread ends, which cancels this

        carrying = asyncio.run_coroutine_threadsafe(carry(), loop)
        try:
            while (answer := await arrived.get()) is not None:
                if isinstance(answer, TllmError):
                    raise answer
                yield answer
        finally:
            carrying.cancel()

    def post(self, message: Message) -> None:
        """Send without waiting; nothing happens when there is no coordinator."""
        channel, loop = self._channel, self._loop
        if channel is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the control thread has ended
                loop.call_soon_threadsafe(channel.post, message)
