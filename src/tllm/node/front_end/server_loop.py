"""`ServerLoop`: the event loop of a machine's HTTP server, which may outlive the office of a first machine."""

from __future__ import annotations

import asyncio

from tllm.node.front_end.engine_link import EngineLink
from tllm.server.run import OpenReplies


class ServerLoop:
    """The event loop that an HTTP server runs in, and the server's connection to the coordinator.

    A node's is run by the thread of its `FrontEnd`. A first machine's is run by the main thread as long as the process
    coordinates. Once that was deposed, and is a node, the `FrontEnd` runs the same loop on, so that the `replies` that
    were in hand go on in it. Whoever `takes` it closes it.
    """

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.link = EngineLink()
        self.replies: OpenReplies | None = None
        self._is_taken = False

    def take(self) -> asyncio.AbstractEventLoop:
        """The loop, for whoever runs it from now on."""
        self._is_taken = True
        return self.runner.get_loop()

    def close_unless_taken(self) -> None:
        """End what runs in it, where nobody has taken it."""
        if not self._is_taken:
            self.runner.close()
