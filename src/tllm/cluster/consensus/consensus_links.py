"""`ConsensusLinks`: one replica's connections to the others, in mutual TLS. What cannot be sent is lost."""

from __future__ import annotations

import asyncio
import logging
import ssl

from tllm.cluster.certificates import Identity
from tllm.cluster.channel import Channel
from tllm.cluster.connection import connect_tls
from tllm.cluster.consensus.raft_messages import CONSENSUS_BYTES, FromReplica, RaftMessage
from tllm.cluster.messages import ReplicaPlace
from tllm.cluster.tls import member_client
from tllm.core.errors import TllmError
from tllm.core.tasks import background, end_tasks

log = logging.getLogger("tllm.cluster")

QUEUED = 256
"""Messages that wait for a connection; later ones are lost, and consensus repeats what matters."""

CONNECT_SECONDS = 1.0
RETRY_SECONDS = 0.2
"""After an attempt to reach a replica that failed: what was to be sent is lost, and more comes soon."""

IDLE_SECONDS = 2.0
"""A connection that nothing is sent on for so long is closed. A leader and its voters write several times a second."""

SILENT_SECONDS = 4.0
"""So is one that nothing comes on, as its other end may have vanished without a word."""


class ConsensusLinks:
    """`post` never waits. Answers do not come back on these connections: whoever answers has its own."""

    def __init__(self, identity: Identity) -> None:
        self._context = member_client(identity)
        self._links: dict[str, tuple[asyncio.Queue[RaftMessage], asyncio.Task[None]]] = {}

    def post(self, place: ReplicaPlace, message: RaftMessage) -> None:
        """Send a message if there is room."""
        if place.id not in self._links:
            queue = asyncio.Queue[RaftMessage](QUEUED)
            task = background(_keep(place, queue, self._context), f"the link to {place.id}")
            self._links[place.id] = queue, task
            task.add_done_callback(lambda _: self._links.pop(place.id, None))
        queue, _ = self._links[place.id]
        if not queue.full():
            queue.put_nowait(message)

    async def close(self) -> None:
        """End all connections."""
        await end_tasks(*(task for _, task in self._links.values()))


async def _keep(place: ReplicaPlace, queue: asyncio.Queue[RaftMessage], context: ssl.SSLContext) -> None:
    """Send what is queued, over one connection after another, until nothing has been queued for a while."""
    channel: Channel | None = None
    try:
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await queue.get()
            except TimeoutError:
                return
            try:
                if channel is None:
                    channel = await connect_tls(
                        place.address, context, place.node, FromReplica, CONSENSUS_BYTES, CONNECT_SECONDS
                    )
                await channel.send(message)
            except TllmError as error:
                log.debug("%s", error.message)
                if channel is not None:
                    channel.abort()
                channel = None
                while not queue.empty():
                    queue.get_nowait()
                await asyncio.sleep(RETRY_SECONDS)
    finally:
        if channel is not None:
            channel.abort()
