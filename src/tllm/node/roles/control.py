"""The worker's control side: a thread that speaks with the coordinator while the main thread computes."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from tllm.cluster.certificates import Identity
from tllm.cluster.channel import Act, Channel
from tllm.cluster.connection import Address, AddressGone, Unreachable, check_own, format_address
from tllm.cluster.consensus.replica import ask_replicas
from tllm.cluster.join import attach
from tllm.cluster.messages import (
    Assign,
    Attached,
    Cancel,
    Heartbeat,
    Load,
    LoadAdapter,
    Message,
    NodeFacts,
    Outputs,
    Probe,
    Progress,
    RankAddresses,
    ReplicaPlace,
    Replicas,
    ReplicaServes,
    RoleAsker,
    RolePlaces,
    ServeReplica,
    Shutdown,
    Start,
    Stop,
    Submit,
    TakeRole,
    UnloadAdapter,
)
from tllm.cluster.remote_errors import failure
from tllm.core.errors import INTERRUPTED, AuthError, ClusterError, LinkError, TllmError
from tllm.core.tasks import background, end_tasks, work_beside
from tllm.core.timing import AwakeClock
from tllm.engine.driver import CancelRequest, CloseRing
from tllm.engine.schedule.batch import ForgetAdapter
from tllm.node.roles.controlled_node import Beside, ControlledNode
from tllm.node.roles.rank_addresses import KnownRankAddresses
from tllm.node.weights.chunk_fetcher import ChunkFetcher
from tllm.spec.request import Output
from tllm.training.questions.answerer_places import AnswererPlace, AnswererPlaces, AskingRun, ReadingAnswerer

log = logging.getLogger("tllm.node")

END_SECONDS = 3.0
"""How long the main thread may take to end once it is told."""

REPORT_SECONDS = 2.0
LEAVE_SECONDS = 20.0
"""How long a node that coordinates may take to hand that over, when it is told to end."""

REJOIN_EVERY = 0.5
"""Seconds from one attempt to the next, while the coordinator is looked for."""

PATIENCE = 3
"""A node waits so many times longer for its coordinator than that for a node, unless another can take its place:
without it all work ends."""

Answer = Message | TllmError


@dataclass(frozen=True)
class WorkerOrder:
    """What the main thread is to do; each of its answers goes to `answer`."""

    message: Assign | Load | Start | TakeRole
    answer: Callable[[Answer], None]


class Inbox:
    """What the control thread has for the main thread.

    orders: what to do next, None to end.
    probes: what to measure next, None when that is all.
    stopped: set when the training is to save and end.
    answerers: where nodes answer the run's questions; the rank that asks them follows it.
    asker: whose questions this node answers in its role, once the coordinator has said it.
    is_unfinished: the cluster ended before its work had come to its end.
    """

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[WorkerOrder | None] = queue.SimpleQueue()
        self.probes: queue.SimpleQueue[Probe | None] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.answerers = AnswererPlaces()
        self.asker: AskingRun | None = None
        self.is_unfinished = False

    def end(self) -> None:
        """There is no more to measure or to do."""
        self.probes.put(None)
        self.orders.put(None)


class CoordinatorFinder:
    """Attaches a node to its coordinator, and looks again for `rejoin` seconds for one that was lost.

    `address` is where the coordinator is, or was. `replicas` of its state know where another one is.
    """

    def __init__(self, address: Address, identity: Identity, facts: NodeFacts, rejoin: float) -> None:
        self.address = address
        self.replicas: tuple[ReplicaPlace, ...] = ()
        self._identity, self._facts, self._rejoin = identity, facts, rejoin

    async def attach(self) -> tuple[Channel, Attached]:
        """The coordinator's channel, and what it asks of its nodes."""
        return await attach(self.address, self._identity, self._facts)

    async def find_again(self, lost: str, node: ControlledNode) -> tuple[Channel, Attached]:
        """The coordinator, or another of its authority, once it is back; `lost` says how it was lost. ClusterError
        where the node is to end instead."""
        seconds = self._rejoin if node.outlives else 0.0
        until, why, told = time.monotonic() + seconds, "", set[str]()
        if seconds:
            where = format_address(self.address)
            if self.replicas:
                log.warning("%s; asks %d replicas for another, for %g s", lost, len(self.replicas), seconds)
                lost = f"{lost}, and no replica named another within {seconds:g} s"
            else:
                log.warning("%s; waits %g s for it, or another of its cluster, to be at %s again", lost, seconds, where)
                lost = f"{lost}, and none was at {where} again within {seconds:g} s"
        while time.monotonic() < until:
            try:
                self.address = await self._named() or self.address
                check_own(self._facts.host)
                place = *node.last_place(), node.role_taken()
                found = await attach(self.address, self._identity, self._facts, *place)
                log.info("found the coordinator at %s", format_address(self.address))
                return found
            except AuthError as error:
                why = error.message
                break
            except TllmError as error:
                why = error.message if isinstance(error, AddressGone) else ""
                if error.message not in told and not isinstance(error, Unreachable):  # somebody is there, and says no
                    told.add(error.message)
                    log.warning("%s", error.message)
                await asyncio.sleep(REJOIN_EVERY)
        raise ClusterError(why or lost)

    async def _named(self) -> Address | None:
        """Where the coordinator is that the replicas have elected. None where there are no replicas. Unreachable while
        none names it: the one that was lost may have been deposed, and would give no orders that count."""
        if not self.replicas:
            return None
        found, _ = await ask_replicas(self.replicas, self._identity)
        if found is None:
            raise Unreachable("no replica names a coordinator yet")
        return found.address


class HeartbeatExchange:
    """Sends heartbeats to a coordinator, and breaks its channel off when its own stay out for too long.

    `silence` then says so; it is "" before. A coordinator that started this node is silent only while somebody suspends
    it, and is waited for, unless another can take its place.
    """

    def __init__(self, channel: Channel, attached: Attached, node: ControlledNode, finder: CoordinatorFinder) -> None:
        self.silence = ""
        self._finder = finder
        self._channel, self._attached, self._node = channel, attached, node
        self._clock = AwakeClock(attached.beat_seconds)
        self._received = self._clock()

    async def received(self, _: Heartbeat) -> None:
        """The coordinator's heartbeat has come."""
        self._received = self._clock()

    async def run(self) -> None:
        while True:
            patience = 1 if self._finder.replicas else math.inf if self._node.ends_with_starter else PATIENCE
            limit = self._attached.silence_seconds * patience
            heard = self._channel.heard
            self._channel.post(self._node.heartbeat())
            await asyncio.sleep(self._attached.beat_seconds)
            if self._channel.heard > heard:  # heartbeats come after a long message, such as 8 MiB of weights
                self._received = self._clock()
            if self._clock() - self._received > limit:
                self.silence = f"the coordinator has been silent for more than {limit:g} s"
                self._channel.abort()


class Control:
    """Runs the control thread, from when it is made until `close`. What the coordinator asks of the main thread comes
    into `inbox`; `fetch` brings the weights that the node lacks.

    `epoch` is the latest that a part was assigned in. Once there is a `reason`, the node ends with it; with an `error`
    it does at once, whatever is under way. A coordinator that is lost is looked for again for `rejoin` seconds, and
    found by its authority. `beside` runs in the node's process beside its part.
    """

    def __init__(
        self,
        address: Address,
        identity: Identity,
        facts: NodeFacts,
        node: ControlledNode,
        fetch: ChunkFetcher,
        rejoin: float = 0.0,
        beside: Beside | None = None,
    ) -> None:
        self.fetch = fetch
        self._beside = beside or Beside()
        self.inbox = Inbox()
        self.error: ClusterError | None = None
        self.reason = ""
        self.epoch = 0
        self._node = node
        self._finder = CoordinatorFinder(address, identity, facts, rejoin)
        self._done = threading.Event()
        attached: Future[tuple[Channel, asyncio.AbstractEventLoop]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(attached)), name="control", daemon=True)
        self._thread.start()
        self._channel, self._loop = attached.result()

    def post(self, message: Message) -> None:
        """Send to the coordinator, without waiting."""
        self._loop.call_soon_threadsafe(lambda: self._channel.post(message))

    def deliver(self, epoch: int, outputs: list[Output]) -> None:
        """Send new tokens to the coordinator. What many prompts came to in one step may be too much for one message."""
        parts = [tuple(outputs)]
        if any(output.prompt_logprobs for output in outputs):
            parts = [(output,) for output in outputs]
        for part in parts:
            self.post(Outputs(epoch, part))

    def report_break(self, epoch: int, error: LinkError) -> None:
        """Tell the coordinator that this node's part cannot go on, and that the node can."""
        log.info("waits for a new part: %s", error.message)
        self.post(msgspec.structs.replace(failure(error), epoch=epoch))

    def report(self, error: BaseException) -> None:
        """Tell the coordinator why this node ends, if it still listens."""
        sent = asyncio.run_coroutine_threadsafe(self._channel.send(failure(error)), self._loop)
        try:
            sent.result(REPORT_SECONDS)
        except (TllmError, TimeoutError) as lost:
            log.warning("could not tell the coordinator: %s", lost)

    def leave(self) -> None:
        """The node ends on purpose: let another coordinate if this process does, and tell the coordinator."""
        self.reason = "its operator stopped it"  # so that no coordinator is looked for again
        if self._beside.replica is not None:
            handing = asyncio.run_coroutine_threadsafe(self._beside.replica.hand_over(), self._loop)
            try:
                if handing.result(LEAVE_SECONDS):
                    return
            except TimeoutError:
                log.warning("no other node took the coordinator's place within %g s", LEAVE_SECONDS)
        self.report(ClusterError(self.reason))

    def close(self) -> None:
        """Let what was posted leave, and end the thread. The main thread's last word."""
        self._done.set()
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._channel.close()))
        self._thread.join(REPORT_SECONDS)

    async def _serve(self, first: Future[tuple[Channel, asyncio.AbstractEventLoop]]) -> None:
        """Follow one coordinator after another until the node ends. `first` is told of the first one's channel."""
        try:
            channel, attached = await self._finder.attach()
        except TllmError as error:
            first.set_exception(error)
            return
        first.set_result((channel, asyncio.get_running_loop()))
        try:
            while True:
                lost = await self._follow(channel, attached)
                if self.reason:
                    break
                channel, attached = await self._finder.find_again(lost, self._node)
        except ClusterError as error:
            self._fail(error.message)
        finally:
            if not self.reason:  # a fault of ours is on its way out, and the process may end before it is there
                log.error("the control thread failed", exc_info=True)
                self._break_down()
            if self._beside.replica is not None:
                await self._beside.replica.close()
            await self.fetch.close()
            await self._end()

    async def _follow(self, channel: Channel, attached: Attached) -> str:
        """Follow a coordinator until it ends the cluster or is lost; how it was lost."""
        self._channel = channel
        self.inbox.stopped.clear()  # which a coordinator asked for that has ended since
        heartbeats = HeartbeatExchange(channel, attached, self._node, self._finder)
        places, command = KnownRankAddresses(), self._node.command

        async def assign(message: Assign) -> Message:
            return await self._assign(places.complete(message))

        acts: dict[type, Act] = {
            RankAddresses: _at_once(places.take),
            Assign: assign,
            Start: self._order_once,
            TakeRole: self._take_role,
            RolePlaces: self._know_answerers,
            RoleAsker: self._know_asker,
            Load: self._order,
            Submit: _at_once(lambda message: command(message.request)),
            Cancel: _at_once(lambda message: command(CancelRequest(message.request_id))),
            LoadAdapter: self._load_adapter,
            UnloadAdapter: _at_once(lambda message: command(ForgetAdapter(message.lora, message.number))),
            Stop: _at_once(lambda _: self.inbox.stopped.set()),
            Probe: _at_once(self.inbox.probes.put),
            Replicas: self._know_replicas,
            ServeReplica: self._serve_replica,
            Heartbeat: heartbeats.received,
            Shutdown: self._shut_down,
            **(self._beside.http.acts() if self._beside.http is not None else {}),
        }
        sending = background(heartbeats.run(), "sending heartbeats")
        try:
            await self.fetch.follow(channel, self._finder.address)
            if self._beside.http is not None:
                self._beside.http.attached(channel)
            await work_beside(sending, channel.run(acts))
            if sending.done():  # by a fault of ours, without which it never is
                self._break_down()
            return heartbeats.silence or "the coordinator went away"
        except TllmError as error:
            return heartbeats.silence or error.message
        finally:
            await end_tasks(sending)
            if self._beside.http is not None:
                self._beside.http.detached()

    def _fail(self, reason: str) -> None:
        """The node cannot go on, unless it was to end anyway."""
        if not self.reason:
            self.reason, self.error = reason, ClusterError(reason)

    def _break_down(self) -> None:
        """This thread cannot go on by a fault of ours, which the log has: end the node, and tell the coordinator."""
        self._fail("its control thread failed, as its log says")
        self._channel.post(failure(ClusterError(self.reason)))

    async def _end(self) -> None:
        """The main thread ends in its own time, or else the process ends without it."""
        self._node.command(CloseRing())
        self.inbox.end()
        if self.error is not None:
            self._node.interrupt()
        until = time.monotonic() + END_SECONDS
        while not self._done.is_set():
            if time.monotonic() > until:
                log.error("%s, and this node still waits for what does not come: it ends", self.reason)
                os._exit(INTERRUPTED if self.inbox.is_unfinished else ClusterError.exit_code)
            await asyncio.sleep(0.02)  # the main thread sets it, and messages go on meanwhile

    async def _order(self, message: Load | Assign | Start | TakeRole) -> AsyncGenerator[Message, None]:
        """Hand an order to the main thread and yield its answers until the last, which is not a `Progress`."""
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(answer: Answer) -> None:
            loop.call_soon_threadsafe(answers.put_nowait, answer)

        self.inbox.orders.put(WorkerOrder(message, put))
        while True:
            answer = await answers.get()
            if isinstance(answer, TllmError):
                raise answer
            yield answer
            if not isinstance(answer, Progress):
                return

    async def _assign(self, message: Assign) -> Message:
        if message.epoch <= self.epoch:  # from a coordinator that another has followed
            raise ClusterError(f"epoch {message.epoch} is over: this node has a part in epoch {self.epoch}")
        self.epoch = message.epoch
        self.fetch.drop()
        self._node.supersede(message)
        return await self._order_once(message)

    async def _order_once(self, message: Assign | Start) -> Message:
        return [answer async for answer in self._order(message)][-1]

    def _take_role(self, message: TakeRole) -> AsyncGenerator[Message, None]:
        self._node.interrupt()  # what it did has no part in any plan any more
        self.inbox.asker = None
        return self._order(message)

    async def _know_answerers(self, message: RolePlaces) -> None:
        places = [AnswererPlace(at.node, (at.host, at.port), at.node, message.run) for at in message.places]
        reading = [ReadingAnswerer(node, read.done, read.total) for node, read in message.reading.items()]
        self.inbox.answerers.tell(message.role, [*places, *reading])

    async def _know_asker(self, message: RoleAsker) -> None:
        self.inbox.asker = AskingRun(message.node, message.run)

    async def _load_adapter(self, message: LoadAdapter) -> Message:
        if message.epoch != self.epoch:
            raise ClusterError(f"epoch {message.epoch} is over")
        return await asyncio.to_thread(self._node.load_adapter, message)

    async def _know_replicas(self, message: Replicas) -> None:
        self._finder.replicas = message.places
        if self._beside.replica is not None:
            self._beside.replica.known(message.places)

    async def _serve_replica(self, message: ServeReplica) -> ReplicaServes:
        if self._beside.replica is None:
            raise ClusterError("this node cannot take the coordinator's place")
        return ReplicaServes(await self._beside.replica.serve(message))

    async def _shut_down(self, message: Shutdown) -> None:
        self.inbox.is_unfinished = message.is_unfinished
        if message.reason and not message.is_unfinished:
            self._fail(message.reason)
            raise ClusterError(message.reason)  # which ends the channel
        self.reason = message.reason or "the coordinator ended the cluster"
        self._node.command(CloseRing())
        self.inbox.end()
        if message.reason:
            self._node.interrupt()


def _at_once(work: Callable[[Any], None]) -> Act:
    """What is to be done with a message, where that waits for nothing."""

    async def act(message: Message) -> None:
        work(message)

    return act
