"""`Membership`: the nodes of a cluster as its coordinator knows them: one channel to each, who is lost, and why."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from tllm.cluster.channel import ANSWER, REFUSAL, Act, Channel, Gone, one_way
from tllm.cluster.connection import NO_ADDRESS, Address, format_address
from tllm.cluster.heartbeat import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    HeartbeatInterval,
    describe,
    fullness,
    overfull,
    silent,
)
from tllm.cluster.messages import PROTOCOL, Attach, Attached, Failure, Heartbeat, Refused, Shutdown
from tllm.cluster.remote_errors import error_of
from tllm.cluster.state import (
    ClusterState,
    Event,
    NodeHeard,
    NodeJoined,
    NodeLost,
    Planned,
    RankBroken,
    RankRefused,
    apply,
)
from tllm.cluster.weight_messages import OpenChunkConnection
from tllm.core.errors import ClusterError, TllmError
from tllm.core.tasks import end_tasks
from tllm.core.timing import AwakeClock
from tllm.node.coordinator.rank_address_updates import RankAddressUpdates

log = logging.getLogger("tllm.node")

ATTACH_SECONDS = 1.0
"""A connection that does not begin with an `Attach` within this time is closed."""

PROBE_SECONDS = 1.0
"""How long the machine of a silent node is given to answer a connection."""

ANSWER_SECONDS = 1.0
"""How long the other ranks' answers are waited for once one could not take its part."""

OUR_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a connection that say something of this machine, and nothing of the other one."""

OnLoss = Callable[[str, TllmError], None]
"""on_loss(node, why)"""

ServeChunks = Callable[[Channel, str], Awaitable[None]]
"""serve_chunks(channel, node): until the channel closes"""


class ProbeResult(NamedTuple):
    """Why a node may be silent, in words, and whether it may still be there: stopped, or starved of the processor."""

    why: str
    is_there: bool


async def why_silent(address: Address, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Why a node may be silent, by how its machine answers a connection to the node's data port.

    An operating system takes connections even for a process that is stopped, and refuses them for one that ended.
    """
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return ProbeResult("its process has ended", False)
    except TimeoutError:
        where = format_address(address)
        return ProbeResult(f"nothing answers at {where}: its machine is cut off, asleep or off", False)
    except OSError as error:
        if error.errno in OUR_LACK:
            return ProbeResult(f"its machine cannot be asked ({error.strerror} on the coordinator's)", True)
        return ProbeResult(f"its machine cannot be reached ({error.strerror})", False)
    except NO_ADDRESS as error:
        return ProbeResult(f"it gave an address that is none ({error})", False)
    writer.transport.abort()
    return ProbeResult(
        "its machine answers and its process does not: it is stopped, starved of the processor, or large packets are "
        "lost on the way, as over a VPN that takes less than the mtu",
        True,
    )


class Surroundings(NamedTuple):
    """What a coordinator learns from outside, beside its nodes' messages; a simulation hands in its own.

    `clock` gives seconds that only ever grow; it and the event loop's timers must be of one clock. Time in which the
    coordinator itself stands still is no silence of its nodes, whose heartbeats wait unread or who stand still as well.
    `why_silent` asks a silent node's machine.
    """

    clock: Callable[[], float]
    why_silent: Callable[[Address], Awaitable[ProbeResult]] = why_silent


class _Calls(NamedTuple):
    """Whom a `Membership` calls, as its own description says."""

    acts: Callable[[str], Mapping[type, Act]]
    on_loss: OnLoss
    on_break: Callable[[], None]
    serve_chunks: ServeChunks


class Membership:
    """Keeps `state`, the cluster's one state, and `channels`, the connection to each node that is here.

    `acts` says what to do with a node's messages beside those of membership itself. `on_loss` is called for each node
    that is lost, before its connection is closed; `on_break` when a node stays but its rank can compute no more.
    `serve_chunks` is given a second connection that a node opens to read weights on. A node that is silent for more
    than `lost_after` seconds, or longer where `interval` says so, is lost. `places` tells nodes where all ranks are.
    `changed` is notified whenever something about the nodes has changed. `is_unfinished`: what the nodes do is to go on
    another time, which they are told when they are to end.
    """

    def __init__(
        self,
        cluster: str,
        acts: Callable[[str], Mapping[type, Act]],
        on_loss: OnLoss,
        on_break: Callable[[], None],
        serve_chunks: ServeChunks,
        lost_after: float = SILENCE_SECONDS,
    ) -> None:
        self.state = ClusterState(cluster=cluster)
        self.channels: dict[str, Channel] = {}
        self.changed = asyncio.Condition()
        self.places = RankAddressUpdates()
        self._warnings = _Warnings()
        self._calls = _Calls(acts, on_loss, on_break, serve_chunks)
        self.interval = HeartbeatInterval(lost_after)
        self.surroundings = Surroundings(AwakeClock(BEAT_SECONDS))
        self.is_ending = self.is_unfinished = False

    def now(self) -> float:
        """The time, as `Member.heard` has it."""
        return self.surroundings.clock()

    def resume(self, epoch: int) -> None:
        """Go on from another coordinator's latest epoch."""
        self.state = msgspec.structs.replace(self.state, epoch=max(self.state.epoch, epoch))

    def record(self, event: Event | Planned) -> None:
        """Apply an event to the state."""
        self.state = apply(self.state, event)

    def is_here(self, node: str) -> bool:
        """Whether a node is connected."""
        return node in self.channels

    async def admit(self, channel: Channel, node: str) -> None:
        """Serve one member until it goes; the control server hands over its connection."""
        frame = await channel.receive_within(ATTACH_SECONDS)
        if frame is None:
            return
        if isinstance(frame.message, OpenChunkConnection) and self.is_here(node):
            await self._calls.serve_chunks(channel, node)
            return
        if not isinstance(frame.message, Attach) or frame.message.facts.node != node:
            raise ClusterError(f"{node} began with a {type(frame.message).__name__} that is not its own Attach")
        if objection := self._objection(frame.message, node):
            await channel.write(REFUSAL, frame.number, objection)
            return
        self.channels[node] = channel
        attach = frame.message
        self.record(NodeJoined(node, attach.facts, self.now(), attach.epoch, attach.rank, attach.role))
        self.interval.grow(self.state.living_count)
        attached = Attached(self.state.cluster, self.interval.seconds, self.interval.lost_after)
        try:
            with suppress(Gone):
                await channel.write(ANSWER, frame.number, attached)
                await self.notify()
                await channel.run(
                    {Heartbeat: self._on_heartbeat(node), Failure: self._on_failure(node), **self._calls.acts(node)}
                )
            await self.mark_lost(
                node, ClusterError(f"{describe(self.state, node)} went away{fullness(self.state, node)}")
            )
        except TllmError as error:
            await self.mark_lost(node, type(error)(f"{describe(self.state, node)}: {error.message}", error.hint))
        finally:
            del self.channels[node]

    async def mark_lost(self, node: str, error: TllmError) -> None:
        """Record that a node is lost. Only the first reason counts: later ones are its consequences."""
        member = self.state.member(node)
        if member is None or not member.is_living or self.is_ending:
            return
        # What is no machine's fault ends the work, which tells of it: the same line twice would hide what it says.
        level = logging.WARNING if isinstance(error, ClusterError) else logging.INFO
        log.log(level, "lost %s: %s", node, error.message)
        self.record(NodeLost(node, error.message))
        self._calls.on_loss(node, error)
        await self.notify()
        if node in self.channels:
            self.channels[node].abort()

    async def watch(self) -> None:
        """Send heartbeats to every member, and mark those lost that are silent, for ever. Where these are very many,
        some are sent their heartbeat each time, and the silent ones are looked for once all have."""
        beat, turn = one_way(Heartbeat()), 0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            turns = self.interval.beats
            turn = (turn + 1) % turns
            for channel in islice(self.channels.values(), turn, None, turns):
                channel.post_frame(beat)
            if turn == 0 and not self.is_ending:  # who was told to end sends nothing more
                await self._look(self.now())

    async def _look(self, now: float) -> None:
        """Warn of nodes that are late or overfull, and mark those lost that are silent."""
        self._warnings.log_late(silent(self.state, now, self.interval.late_after))
        self._warnings.log_overfull(overfull(self.state))
        missing = silent(self.state, now, self.interval.asked_after)
        await asyncio.gather(*(self._miss(event) for event in missing))

    async def _miss(self, event: NodeLost) -> None:
        """Mark a silent node lost, unless a heartbeat comes while we find out why it is silent. One whose machine
        answers may only be held up, and has as many heartbeats more to miss as `interval` says."""
        before = self.state.member(event.node)
        assert before is not None, "only members are missed"
        found = await self.surroundings.why_silent((before.facts.host, before.facts.port))
        member = self.state.member(event.node)
        if member is None or member.heard != before.heard:
            return
        if not found.is_there or self.now() - member.heard > self.interval.lost_after:
            await self.mark_lost(event.node, ClusterError(f"{event.reason}: {found.why}"))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the members holds. It is looked at again whenever `notify` is called."""
        async with self.changed:
            await self.changed.wait_for(holds)

    async def news(self) -> None:
        """Wait until `notify` is called."""
        async with self.changed:
            await self.changed.wait()

    async def each(self, work: Callable[[str, Channel, int], Awaitable[None]]) -> None:
        """Do the same with every rank of the plan at once. The first that fails ends it, with its node's name.

        What others answer just after it is recorded too, since a failure between two ranks does not say which of them
        is at fault.
        """

        async def with_rank(node: str, rank: int) -> None:
            if node not in self.channels:
                raise Gone(f"{describe(self.state, node)} is gone")
            try:
                await work(node, self.channels[node], rank)
            except TllmError as error:
                if not isinstance(error, Gone):  # of one that went, `admit` hears why
                    self.record(RankRefused(node, error.message, error.peer))
                if node in error.message:
                    raise
                raise type(error)(f"{describe(self.state, node)}: {error.message}", error.hint) from error

        ranks = [(member.node, rank) for rank, member in enumerate(self.state.ranks)]
        tasks = [asyncio.create_task(with_rank(node, rank)) for node, rank in ranks]
        try:
            await asyncio.gather(*tasks)
        except TllmError:
            await hear_others(tasks)
            raise
        finally:
            await end_tasks(*tasks)

    def end(self, reason: str = "") -> None:
        """Tell every member to end, once; `reason` is what is wrong. Those that do not are their starters' to end."""
        if not self.is_ending:
            self.is_ending = True
            for channel in self.channels.values():
                channel.post(Shutdown(reason, self.is_unfinished))

    def abandon(self) -> None:
        """Let all members go without a word: another coordinator has them."""
        self.is_ending = True
        for channel in self.channels.values():
            channel.abort()

    def _objection(self, attach: Attach, node: str) -> Refused | None:
        """Why a node is not taken in. One that is here already may try again: its old channel may be dead unnoticed."""
        if attach.protocol != PROTOCOL:
            return Refused(f"{node} speaks protocol {attach.protocol}, the coordinator {PROTOCOL}", kind="auth")
        if self.is_here(node) or self.is_ending:
            return Refused(f"{node} is here already, or the cluster ends", kind="cluster")
        return None

    def _on_heartbeat(self, node: str) -> Act:
        async def record(beat: Heartbeat) -> None:
            self.record(NodeHeard(node, beat, self.now()))

        return record

    def _on_failure(self, node: str) -> Act:
        async def fail(failure: Failure) -> None:
            error = error_of(failure, describe(self.state, node))
            if failure.epoch is None:
                await self.mark_lost(node, error)
            elif failure.epoch == self.state.epoch:
                log.warning("%s", error.message)
                self.record(RankBroken(node, error.message))
                self._calls.on_break()
                await self.notify()

        return fail

    async def notify(self) -> None:
        """Wake whoever waits in `until`, to see whether it now holds."""
        async with self.changed:
            self.changed.notify_all()


async def hear_others(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait for what ranks answer after the first failure; no longer once a node is gone, as that explains it."""
    waiting, until = set(tasks), time.monotonic() + ANSWER_SECONDS
    while waiting:
        done, waiting = await asyncio.wait(
            waiting, timeout=max(until - time.monotonic(), 0), return_when=asyncio.FIRST_COMPLETED
        )
        if not done or any(isinstance(task.exception(), Gone) for task in done):
            return


class _Warnings:
    """What of its nodes the operator was warned of already."""

    def __init__(self) -> None:
        self._late: set[str] = set()
        self._overfull: set[str] = set()

    def log_late(self, events: Sequence[NodeLost]) -> None:
        """Log that a node is late as soon as it is, once each time."""
        for event in events:
            if event.node not in self._late:
                log.warning("%s", event.reason)
        self._late = {event.node for event in events}

    def log_overfull(self, warnings: Mapping[str, str]) -> None:
        """Log that a node takes more memory than it was given, only once, as what it holds goes up and down."""
        for node, words in warnings.items():
            if node not in self._overfull:
                log.warning("%s: give it more (--memory), or a smaller part of the plan", words)
        self._overfull |= warnings.keys()
