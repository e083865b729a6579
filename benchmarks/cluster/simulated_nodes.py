"""Nodes that are not there, for a coordinator that is: each speaks the control protocol over a connection in memory.

What the coordinator writes and reads are the very frames of `tllm.cluster.channel`. A simulated node answers them as a
`tllm.node.worker` does, after the time that its machine and the network take; it computes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tllm.cluster.channel import ANSWER, END, HEAD, ITEM, ONE_WAY, QUESTION, REFUSAL, Channel, one_way
from tllm.cluster.messages import (
    MEMBER_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Failure,
    FromNode,
    Heartbeat,
    Loaded,
    Message,
    News,
    NodeFacts,
    Prepared,
    Progress,
    RankAddresses,
    Refused,
    Started,
    ToNode,
)
from tllm.core.errors import ClusterError, TllmError
from tllm.node.coordinator.membership import Membership
from tllm.node.roles.rank_addresses import KnownRankAddresses
from tllm.training.report.events import RunBegan, RunStepped, encode
from tllm.training.report.metrics import StepRecord

KNOCK_SECONDS = 2.0
"""A node that is refused, as the coordinator takes it for alive, comes again after up to so long."""

LOOK = 16
"""So many nodes read where all ranks are, as every true node does; the others let it pass."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToNode).decode
_attached = msgspec.msgpack.Decoder(Attached).decode


class _Tag(msgspec.Struct):
    """Only the name of a message, so that a node that is not there spends no time on the rest."""

    type: str


_tag = msgspec.msgpack.Decoder(_Tag).decode


@dataclass(frozen=True, kw_only=True)
class Machines:
    """How simulated machines and their network behave, times in seconds; each node draws its own once.

    latency: one way to the coordinator, between these two.
    prepare: connecting the links of an epoch. load: filling the weights. keep: the part of that which it takes a node
    that goes on with its own, as `faults.recovery_timeline` measured it (60 million parameters, beside a rank that gets
    all from other ranks' memory). step: a step of the run. stragglers: the part of the nodes that takes `slowness`
    times as long for both.
    """

    latency: tuple[float, float] = (0.0005, 0.02)
    prepare: tuple[float, float] = (0.2, 1.0)
    load: tuple[float, float] = (0.5, 3.0)
    keep: float = 0.27
    step: float = 2.0
    stragglers: float = 0.01
    slowness: float = 5.0


@dataclass
class Traffic:
    """Messages and their bytes on control connections, heads included, TLS excluded, by the message's name."""

    to_nodes: Counter[str] = field(default_factory=Counter)
    from_nodes: Counter[str] = field(default_factory=Counter)
    bytes_to_nodes: Counter[str] = field(default_factory=Counter)
    bytes_from_nodes: Counter[str] = field(default_factory=Counter)

    def sent(self, name: str, nbytes: int) -> None:
        """The coordinator has sent a message."""
        self.to_nodes[name] += 1
        self.bytes_to_nodes[name] += nbytes

    def came(self, name: str, nbytes: int) -> None:
        """A node has sent one."""
        self.from_nodes[name] += 1
        self.bytes_from_nodes[name] += nbytes

    @property
    def messages(self) -> int:
        return self.to_nodes.total() + self.from_nodes.total()

    @property
    def nbytes(self) -> int:
        return self.bytes_to_nodes.total() + self.bytes_from_nodes.total()

    def without_beats(self) -> tuple[int, int]:
        """Messages and bytes of all that are no heartbeats."""
        beats = self.to_nodes["Heartbeat"] + self.from_nodes["Heartbeat"]
        beat_bytes = self.bytes_to_nodes["Heartbeat"] + self.bytes_from_nodes["Heartbeat"]
        return self.messages - beats, self.nbytes - beat_bytes


class SimulatedCluster:
    """All nodes that there are, and the connections by which the coordinator's `members` has them.

    `step` counts the steps that rank 0 has reported, `refused` the nodes that were turned away. Every `parts` ranks are
    a replica: a rank has the weights that the rank so many after it has.
    """

    def __init__(self, members: Membership, machines: Machines, seed: int, parts: int) -> None:
        self.members, self.machines, self.parts = members, machines, parts
        self.random = random.Random(seed)
        self.traffic = Traffic()
        self.nodes: dict[str, SimulatedNode] = {}
        self.loop = asyncio.get_running_loop()
        self.step = self.refused = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._made = 0

    def arrive(self, count: int, within: float) -> None:
        """Let so many new nodes join, spread evenly at random over the next seconds."""
        for _ in range(count):
            node = SimulatedNode(self, f"node-{self._made:05d}", self._made)
            self._made += 1
            self.loop.call_later(self.random.uniform(0, within), node.attach)

    def come_back(self, dead: SimulatedNode) -> None:
        """The machine of a node that died has started again, and knocks by its old name."""
        SimulatedNode(self, dead.name, dead.number).attach()

    def kill(self, node: SimulatedNode, is_silent: bool) -> None:
        """A node dies. Its connections are cut, or where `is_silent`, as of a machine without power, stay open.

        Its neighbours' links break, and as ranks that wait for each other stop, all other links follow.
        """
        node.die(is_silent)
        if not is_silent:
            for other in list(self.nodes.values()):
                other.later(self.random.uniform(0.01, 0.2), other.link_broke)


class SimulatedNode:
    """One node: its end of the control connection, and the part that it has in the latest epoch."""

    def __init__(self, cluster: SimulatedCluster, name: str, number: int) -> None:
        machines, draw = cluster.machines, cluster.random
        self.name, self.number, self.cluster = name, number, cluster
        self.latency = draw.uniform(*machines.latency)
        slow = machines.slowness if draw.random() < machines.stragglers else 1.0
        self.prepare, self.load = slow * draw.uniform(*machines.prepare), slow * draw.uniform(*machines.load)
        self.epoch, self.rank, self.is_running = 0, -1, False
        self._has = -1  # the part of a replica whose weights it has
        self.is_here = True
        self.beat = 0.0  # until it is taken in
        self.places = KnownRankAddresses()
        self._reader: asyncio.StreamReader | None = None

    def attach(self) -> None:
        """Join: the coordinator's side of the connection is its own `Channel` and `Membership.admit`."""
        cluster, host = self.cluster, f"10.{self.number >> 16}.{self.number >> 8 & 255}.{self.number & 255}"
        self._reader = asyncio.StreamReader(loop=cluster.loop)
        channel = Channel(self._reader, _Writer(self), self.name, FromNode, MEMBER_BYTES)  # type: ignore[arg-type]
        cluster.nodes[self.name] = self
        task = cluster.loop.create_task(self._admitted(channel))
        cluster.tasks.add(task)
        task.add_done_callback(cluster.tasks.discard)
        facts = NodeFacts(
            node=self.name,
            host_name=f"host-{self.number:05d}",
            memory_bytes=64 * 2**30,
            cores=16,
            host=host,
            port=40000 + self.number % 20000,
            lends=30000 + self.number % 9000,
            pid=1000 + self.number,
            versions={"torch": "2.13.0", "tllm": "0.1.0", "python": "3.11.9"},
        )
        self.send(QUESTION, 1, Attach(PROTOCOL, facts))

    def die(self, is_silent: bool) -> None:
        """Say nothing any more."""
        self.is_here = self.is_running = False
        if self.cluster.nodes.get(self.name) is self:
            del self.cluster.nodes[self.name]
        if not is_silent and self._reader is not None:
            self.cluster.loop.call_later(self.latency, self._reader.feed_eof)

    def _turned_away(self) -> None:
        """The coordinator has not missed the machine that had this name: come again."""
        cluster = self.cluster
        self.die(is_silent=True)
        cluster.refused += 1
        cluster.loop.call_later(cluster.random.uniform(0.5, 1) * KNOCK_SECONDS, cluster.come_back, self)

    def link_broke(self) -> None:
        """A link to another rank broke: this node's part ends, and the coordinator is told."""
        if self.is_running:
            self.is_running = False
            words = f"the link from rank {self.rank} to rank {self.rank + 1} broke"
            self.send(ONE_WAY, 0, Failure(message=words, kind="link", epoch=self.epoch))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after so long, if this node is there then."""
        self.cluster.loop.call_later(seconds, self._unless_gone, act)

    def send(self, kind: int, number: int, message: Message | None) -> None:
        """A frame to the coordinator, which has it after the latency."""
        body = b"" if message is None else _encode(message)
        self._feed(type(message).__name__, HEAD.pack(len(body), kind, number) + body)

    def take(self, frame: bytes) -> None:
        """A frame that the coordinator has written."""
        if frame == PLAIN_BEAT:
            self.cluster.traffic.sent("Heartbeat", len(frame))
            return
        _, kind, number = HEAD.unpack_from(frame)
        body = memoryview(frame)[HEAD.size :]
        name = _tag(body).type if len(body) else "end"
        self.cluster.traffic.sent(name, len(frame))
        if not self.is_here or name in ("Heartbeat", "Shutdown", "Stop"):
            return
        if kind == REFUSAL and self.beat == 0:
            self._turned_away()
            return
        if name == "Attached":
            self.beat = _attached(body).beat_seconds
            self.later(self.cluster.random.uniform(0, self.beat), self._beat)
            return
        if name == "RankAddresses":
            if self.number < LOOK:
                self._look(_decode(body))
            return
        if kind == REFUSAL:
            raise AssertionError(f"{self.name} was refused: {_decode(body)}")
        self.cluster.loop.call_later(self.latency, self._unless_gone, lambda: self._follow(number, name, body))

    def _follow(self, number: int, name: str, body: memoryview) -> None:
        match name:
            case "Assign":
                self._take_part(number, body)
            case "Load":
                part, epoch = self.rank % self.cluster.parts, self.epoch
                seconds = self.load * (self.cluster.machines.keep if part == self._has else 1.0)
                self.later(0.1 * seconds, lambda: self.send(ITEM, number, Progress(1 << 20, 10 << 20)))
                self.later(seconds, lambda: self._loaded(number, part, epoch))
            case "Start":
                self.send(ANSWER, number, Started(self.rank))
                self.is_running = True
                if self.rank == 0:
                    self._begin(self.epoch)
            case _:
                raise AssertionError(f"{self.name} has no answer to {name}")

    def _look(self, told: RankAddresses) -> None:
        try:
            self.places.take(told)
        except ClusterError as error:
            raise AssertionError(f"{self.name}: {error.message}") from error

    def _take_part(self, number: int, body: memoryview) -> None:
        part = _Part(body)
        self.epoch, self.rank, self.is_running = part.epoch, part.rank, False
        if self.number < LOOK:
            place = self.places.complete(_decode(body)).places[self.rank]
            assert place.node == self.name, f"rank {self.rank} is {self.name}, and was told that it is {place.node}"
        epoch = self.epoch

        def prepared() -> None:
            if epoch == self.epoch:
                self.send(ANSWER, number, Prepared(rank=self.rank))
            else:
                self.send(REFUSAL, number, Refused(f"epoch {epoch} is over", kind="cluster"))

        self.later(self.prepare, prepared)

    def _loaded(self, number: int, part: int, epoch: int) -> None:
        if epoch == self.epoch:
            self._has = part
        loaded = Loaded(rank=self.rank, bytes_read=10 << 20, fetched=0, seconds=self.load, rss_bytes=1 << 30)
        self.send(ITEM, number, loaded)
        self.send(END, number, None)

    def _begin(self, epoch: int) -> None:
        """Rank 0 reports that the run goes on, and then each step."""
        cluster = self.cluster
        self.send(ONE_WAY, 0, News(encode(RunBegan(cluster.step, 10**9, 1e15, origin="memory"))))

        def step() -> None:
            if self.is_running and self.epoch == epoch:
                cluster.step += 1
                self.send(ONE_WAY, 0, News(encode(RunStepped(_record(cluster.step)))))
                self.later(cluster.machines.step, step)

        self.later(cluster.machines.step, step)

    def _beat(self) -> None:
        self._feed("Heartbeat", BEAT)
        self.cluster.loop.call_later(self.beat, self._unless_gone, self._beat)

    def _feed(self, name: str, frame: bytes) -> None:
        assert self._reader is not None
        self.cluster.traffic.came(name, len(frame))
        self.cluster.loop.call_later(self.latency, self._reader.feed_data, frame)

    def _unless_gone(self, act: Callable[[], None]) -> None:
        if self.is_here:
            act()

    async def _admitted(self, channel: Channel) -> None:
        """As `ControlServer` serves a member that has shown its certificate."""
        try:
            await self.cluster.members.admit(channel, self.name)
        except TllmError:
            self.die(is_silent=True)
        finally:
            await channel.close()


class _Writer:
    """The coordinator's end of a connection: a stream writer whose other end takes everything at once."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node, self._is_closing = node, False
        self.transport = self

    def write(self, frame: bytes) -> None:
        self._node.take(frame)

    async def drain(self) -> None:
        """Nothing is ever left."""

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    async def wait_closed(self) -> None:
        """It is."""

    def abort(self) -> None:
        self._is_closing = True
        reader = self._node._reader
        if reader is not None and not reader.at_eof():
            reader.feed_eof()


class _Part:
    """What a node needs of an `Assign`, read without the rest."""

    def __init__(self, body: memoryview) -> None:
        found = msgspec.msgpack.decode(body, type=_Place)
        self.epoch, self.rank = found.epoch, found.rank


class _Place(msgspec.Struct):
    epoch: int
    rank: int


def _beat_frame() -> bytes:
    """A heartbeat of a rank that trains: six wires of a ring and of trees, as much as it holds, and what it refused."""
    links = {f"{source}>{source + 1} dp": 10**9 + source for source in range(1000, 1006)}
    stats = {"refused_links": 0.0, "refused_frames": 0.0, "step": 1000.0, "computing": 0.93}
    return one_way(Heartbeat(rss_bytes=9 * 2**30, peak_bytes=10 * 2**30, links=links, stats=stats))


def _record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=2.0, grad_norm=1.0, learning_rate=1e-4, tokens=1 << 20, seconds=2.0, tokens_per_second=5e5
    )


BEAT = _beat_frame()
PLAIN_BEAT = one_way(Heartbeat())
