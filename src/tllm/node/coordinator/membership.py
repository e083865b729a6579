"""Why a node may be silent, from how its machine answers a connection to its data port.

`Membership`: the coordinator's nodes: who is here, one channel to each, and the news of whoever is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from tllm.cluster.channel import ANSWER, REFUSAL, Act, Channel, Gone
from tllm.cluster.connection import Address, spell
from tllm.cluster.heartbeat import BEAT_SECONDS, LATE_SECONDS, SILENCE_SECONDS, describe, fullness, overfull, silent
from tllm.cluster.messages import PROTOCOL, Attach, Attached, Failure, Heartbeat, OpenChunkConnection, Refused, Shutdown
from tllm.cluster.remote_errors import error_of
from tllm.cluster.state import ClusterState, Event, NodeHeard, NodeJoined, NodeLost, Planned, RankBroken, apply
from tllm.core.errors import ClusterError, TllmError

PROBE_SECONDS = 1.0


async def why_silent(address: Address, seconds: float = PROBE_SECONDS) -> str:
    """In words. A system takes connections even for a process that is stopped, and refuses them for one that ended."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return "its process has ended"
    except TimeoutError:
        return f"nothing answers at {spell(address)}: its machine is cut off, asleep or off"
    except OSError as error:
        return f"its machine cannot be reached ({error.strerror})"
    writer.transport.abort()
    return "its machine answers and its process does not: it is stopped, or starved of the processor"


log = logging.getLogger("tllm.node")

ATTACH_SECONDS = 1.0
OWN_DELAY_SECONDS = 1.0

OnLoss = Callable[[str, TllmError], None]
"""on_loss(node, why)"""

Lend = Callable[[Channel, str], Awaitable[None]]
"""lend(channel, node): until the channel closes"""


class Membership:
    """Keeps `state`, the one truth about the cluster. `on_loss` is told of each node that goes before we end it,
    `on_break` when one that stays can compute no more.

    `acts` says what to do with a member's messages beside those of membership itself, `lend` what with a second
    connection that it opens to read weights on. Who is silent for more than `lost_after` seconds is lost.
    """

    def __init__(
        self,
        cluster: str,
        acts: Callable[[str], Mapping[type, Act]],
        on_loss: OnLoss,
        on_break: Callable[[], None],
        lend: Lend,
        lost_after: float = SILENCE_SECONDS,
    ) -> None:
        self.state = ClusterState(cluster=cluster)
        self.channels: dict[str, Channel] = {}
        self.changed = asyncio.Condition()
        self._late: set[str] = set()
        self._overfull: set[str] = set()
        self._acts = acts
        self._on_loss, self._on_break, self._lend = on_loss, on_break, lend
        self._lost_after = lost_after
        self.is_ending = False

    def tell(self, event: Event | Planned) -> None:
        """Let something have happened."""
        self.state = apply(self.state, event)

    def is_here(self, node: str) -> bool:
        return node in self.channels

    async def admit(self, channel: Channel, node: str) -> None:
        """A member's whole stay, as the door hands it over."""
        frame = await channel.receive_within(ATTACH_SECONDS)
        if frame is None:
            return
        if isinstance(frame.message, OpenChunkConnection) and self.is_here(node):
            await self._lend(channel, node)
            return
        if not isinstance(frame.message, Attach) or frame.message.facts.node != node:
            raise ClusterError(f"{node} began with a {type(frame.message).__name__} that is not its own Attach")
        if no := self._objection(frame.message, node):
            await channel.write(REFUSAL, frame.number, no)
            return
        self.channels[node] = channel
        came = frame.message
        self.tell(NodeJoined(node, came.facts, time.monotonic(), came.epoch, came.rank))
        attached = Attached(self.state.cluster, BEAT_SECONDS, self._lost_after)
        try:
            with suppress(Gone):
                await channel.write(ANSWER, frame.number, attached)
                await self.wake()
                await channel.run({Heartbeat: self._hear(node), Failure: self._failed(node), **self._acts(node)})
            await self.lose(node, ClusterError(f"{describe(self.state, node)} went away{fullness(self.state, node)}"))
        except TllmError as error:
            await self.lose(node, type(error)(f"{describe(self.state, node)}: {error.message}", error.hint))
        finally:
            del self.channels[node]

    async def lose(self, node: str, error: TllmError) -> None:
        """A node is lost, once; later reasons are only what follows."""
        member = self.state.member(node)
        if member is None or not member.is_living or self.is_ending:
            return
        log.warning("lost %s: %s", node, error.message)
        self.tell(NodeLost(node, error.message))
        self._on_loss(node, error)
        await self.wake()
        if node in self.channels:
            self.channels[node].abort()

    async def watch(self) -> None:
        """Beat to every member and miss those that are silent, for ever."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.monotonic()
            was_late, last = now - last > BEAT_SECONDS + OWN_DELAY_SECONDS, now
            for channel in self.channels.values():
                channel.post(Heartbeat())
            if was_late:  # it was we who slept; what they sent meanwhile is still to be read
                continue
            self._tell_late(silent(self.state, now, LATE_SECONDS))
            self._tell_overfull(overfull(self.state))
            await asyncio.gather(*(self._miss(event) for event in silent(self.state, now, self._lost_after)))
            last = time.monotonic()

    def _tell_late(self, events: Sequence[NodeLost]) -> None:
        """Name a node to the operator as soon as it is late, once each time."""
        for event in events:
            if event.node not in self._late:
                log.warning("%s", event.reason)
        self._late = {event.node for event in events}

    def _tell_overfull(self, found: Mapping[str, str]) -> None:
        """Name a node that takes more memory than it was given, once: what it holds comes and goes."""
        for node, words in found.items():
            if node not in self._overfull:
                log.warning("%s: give it more (--memory), or a smaller part of the plan", words)
        self._overfull |= found.keys()

    async def _miss(self, event: NodeLost) -> None:
        """Lose a silent node, unless it is heard while we see why."""
        before = self.state.member(event.node)
        assert before is not None, "only members are missed"
        why = await why_silent((before.facts.host, before.facts.port))
        member = self.state.member(event.node)
        if member is not None and member.heard == before.heard:
            await self.lose(event.node, ClusterError(f"{event.reason}: {why}"))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something about the members."""
        async with self.changed:
            await self.changed.wait_for(holds)

    async def each(self, work: Callable[[str, Channel, int], Awaitable[None]]) -> None:
        """The same work with every rank of the plan at once; the first that fails ends it, with its node's name."""

        async def one(node: str, rank: int) -> None:
            if node not in self.channels:
                raise ClusterError(f"{describe(self.state, node)} is gone")
            try:
                await work(node, self.channels[node], rank)
            except TllmError as error:
                if node in error.message:
                    raise
                raise type(error)(f"{describe(self.state, node)}: {error.message}", error.hint) from error

        ranks = [(member.node, rank) for rank, member in enumerate(self.state.ranks)]
        tasks = [asyncio.create_task(one(node, rank)) for node, rank in ranks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, reason: str = "") -> None:
        """Tell every member to end, once; `reason` is what is wrong. Those that do not are their starters' to end."""
        if not self.is_ending:
            self.is_ending = True
            for channel in self.channels.values():
                channel.post(Shutdown(reason))

    def _objection(self, attach: Attach, node: str) -> Refused | None:
        """Why a node is not taken in. That it is here already may pass: its old channel may be dead unnoticed."""
        if attach.protocol != PROTOCOL:
            return Refused(f"{node} speaks protocol {attach.protocol}, the coordinator {PROTOCOL}", kind="auth")
        if self.is_here(node) or self.is_ending:
            return Refused(f"{node} is here already, or the cluster ends", kind="cluster")
        return None

    def _hear(self, node: str) -> Act:
        async def hear(beat: Heartbeat) -> None:
            self.tell(NodeHeard(node, beat, time.monotonic()))

        return hear

    def _failed(self, node: str) -> Act:
        async def fail(failure: Failure) -> None:
            error = error_of(failure, describe(self.state, node))
            if failure.epoch is None:
                await self.lose(node, error)
            elif failure.epoch == self.state.epoch:
                log.warning("%s", error.message)
                self.tell(RankBroken(node, error.message))
                self._on_break()
                await self.wake()

        return fail

    async def wake(self) -> None:
        """Let whoever waits for something see whether it has come."""
        async with self.changed:
            self.changed.notify_all()
