"""`DoctorRank`: one node's part in an examination. It measures itself and, when asked, the path to another node."""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import msgspec
import torch

from tllm.cluster import messages
from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Loaded, Prepared
from tllm.cluster.settings import DoctorSettings, SurveySettings
from tllm.cluster.tls import data_client
from tllm.comm.links.connect import LinkHello, Listener, connect
from tllm.comm.links.link import Link
from tllm.core.errors import AuthError, LinkError, LinkTimeout
from tllm.core.memory import rss_bytes
from tllm.devices.choose import CPU
from tllm.devices.memory import available_memory
from tllm.engine.driver import Command
from tllm.node.machine.machine_facts import (
    NetworkPath,
    NodeProbe,
    PathMeasurement,
    TorchFacts,
    machine_facts,
    path_mtu,
    resent_packets,
)
from tllm.node.machine.measure import measure
from tllm.node.machine.process_facts import programs
from tllm.node.roles.control import Control
from tllm.node.roles.role import Certificate, Role, bytes_by_wire, check_speaker
from tllm.node.topology.read_topology import read_topology
from tllm.spec.plan import Wire
from tllm.weights.byte_source import Fetch
from tllm.weights.load import Progress

ASK, ANSWER = "ask", "answer"
"""The names of the wires: a node's requests to another, and the other's answers. So two may ask each other at once."""

CONNECT_SECONDS = 10.0
MAX_PINGS = 200
TILE_BYTES = 256 * 1024
"""Of one message of a bandwidth measurement."""

REQUEST = struct.Struct(">I")  # how many tiles follow
TIME = struct.Struct(">d")  # the other end's clock, seconds since 1970


class DoctorRank:
    """Connects the wires that it can, and keeps why the others failed, which is a result too. Then it answers requests
    of other ranks until the examination ends."""

    outlives = False
    result_type: type[messages.News | messages.Findings] = messages.News
    """The message that carries a result to the coordinator."""

    def __init__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None = None
    ) -> None:
        assert isinstance(assign.settings, DoctorSettings | SurveySettings), "another part"
        self.rank, self.settings = assign.rank, assign.settings
        self._names = [place.node for place in assign.places]
        self._hosts = [place.host for place in assign.places]
        self._links, self._faults = connect_all(assign, identity, listener)
        for wire in self._links:
            if wire.name == ASK and wire.target == self.rank:
                threading.Thread(
                    target=self._serve, args=(wire.source,), name=f"answers {wire.source}", daemon=True
                ).start()

    def prepared(self) -> Prepared:
        """Nothing to hold."""
        return Prepared(rank=self.rank)

    def load(self, progress: Progress) -> Loaded:
        """Nothing to load."""
        return Loaded(rank=self.rank, bytes_read=0, fetched=0, seconds=0.0, rss_bytes=rss_bytes())

    def run(self, control: Control) -> None:
        """Measure what the coordinator asks for, until it ends: the path to another rank, or this node itself."""
        while (probe := control.inbox.probes.get()) is not None and probe.target is not None:
            result = self.examine() if probe.target == self.rank else self.probe(probe.target, probe.meet)
            control.post(self.result_type(msgspec.json.encode(result)))

    def stats(self) -> dict[str, float]:
        return {}

    def link_bytes(self) -> dict[str, int]:
        return bytes_by_wire(self._links)

    def command(self, command: Command) -> None:
        """Nothing: no requests are served here."""

    def interrupt(self) -> None:
        for link in self._links.values():
            link.interrupt()

    def close(self) -> None:
        """End the wires; nothing that is under way matters any more."""
        self.interrupt()
        for link in self._links.values():
            link.close()

    def examine(self) -> msgspec.Struct:
        """This machine and its speeds."""
        return examine(self._names[self.rank], self._hosts[self.rank], self.settings.measure_seconds)

    def probe(self, target: int, meet: bool) -> msgspec.Struct:
        """What is measured between here and another rank."""
        assert not meet, "a doctor asks for paths alone"
        return self.path_to(target)

    def path_to(self, target: int) -> NetworkPath:
        """The network path to another rank and back, measured by requests that it answers."""
        source, there = self._names[self.rank], self._names[target]
        ask, answer = Wire(self.rank, target, ASK), Wire(target, self.rank, ANSWER)
        fault = self._faults.get(ask) or self._faults.get(answer)
        if fault is not None:
            return NetworkPath(source=source, target=there, fault=fault)
        try:
            measured = measure_path(
                self._links[ask], self._links[answer], self._hosts[target], self.settings.way_seconds
            )
        except LinkError as error:
            advice = error.hint if isinstance(error, LargePacketsLost) else ""
            return NetworkPath(source=source, target=there, fault=error.message, advice=advice)
        return NetworkPath(source=source, target=there, measured=measured)

    def _serve(self, asker: int) -> None:
        """Answer one rank's requests for as long as its wires last."""
        ask, back = self._links[Wire(asker, self.rank, ASK)], self._links.get(Wire(self.rank, asker, ANSWER))
        if back is not None:
            answer(ask, back)


def examine(node: str, address: str, seconds: float, device: torch.device = CPU) -> NodeProbe:
    """The machine of this process, measured for about so many seconds; its speeds are those of the `device`."""
    machine = machine_facts()  # before our own work shows in its load
    free = machine.memory_free_bytes if device == CPU else available_memory(device)
    speeds = measure(seconds, free, device=device)
    return NodeProbe(
        node=node,
        host_name=socket.gethostname(),
        address=address,
        versions={**programs(), "torch": str(torch.__version__)},
        machine=machine,
        topology=read_topology(),
        torch=torch_facts(),
        products=speeds.products,
        memory=speeds.memory,
        operation=speeds.operation,
    )


def torch_facts() -> TorchFacts:
    """The build of torch in this process."""
    return TorchFacts(
        version=str(torch.__version__),
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
    )


def all_wires(ranks: int) -> list[Wire]:
    """Every directed wire of an examination: two each way between any two ranks."""
    return [Wire(a, b, name) for a in range(ranks) for b in range(ranks) if a != b for name in (ASK, ANSWER)]


def connect_all(assign: Assign, identity: Identity, listener: Listener) -> tuple[dict[Wire, Link], dict[Wire, str]]:
    """This rank's ends of all wires that can be connected, and for each other one why not."""
    assert isinstance(assign.settings, DoctorSettings | SurveySettings), "another part"
    link_seconds = assign.settings.link_seconds
    mine = [wire for wire in all_wires(len(assign.places)) if assign.rank in (wire.source, wire.target)]
    listener.expect(assign.cluster, assign.epoch, [wire for wire in mine if wire.target == assign.rank])
    context, links, faults = data_client(identity), dict[Wire, Link](), dict[Wire, str]()
    until = time.monotonic() + CONNECT_SECONDS

    def speaks_for_target(hello: LinkHello, certificate: Certificate | None) -> None:
        check_speaker(certificate, assign.places[hello.target].node, hello.target)

    def open_one(wire: Wire) -> None:
        try:
            if wire.target == assign.rank:
                link = listener.accept(wire, max(0.0, until + 1 - time.monotonic()))
            else:
                place, hello = assign.places[wire.target], LinkHello(assign.cluster, assign.epoch, *wire)
                link = connect((place.host, place.port), context, hello, CONNECT_SECONDS, speaks_for_target)
        except (LinkError, AuthError) as error:
            faults[wire] = error.message
            return
        link.set_deadline(link_seconds)
        links[wire] = link

    with ThreadPoolExecutor(max(1, len(mine)), "reach") as pool:
        list(pool.map(open_one, mine))
    return links, faults


def answer(ask: Link, back: Link) -> None:
    """Answer each request with the time here, once all tiles that it announced have come; until the other end goes."""
    ask.set_deadline(float("inf"))
    tile = torch.empty(TILE_BYTES, dtype=torch.uint8)
    try:
        while True:
            for _ in range(REQUEST.unpack(ask.recv_bytes(REQUEST.size))[0]):
                ask.recv(tuple(tile.shape), tile.dtype, tile)
            back.send_bytes(TIME.pack(time.time()))
    except LinkError:
        return


def measure_path(ask: Link, back: Link, host: str, seconds: float) -> PathMeasurement:
    """Measure for about so many seconds in all: short requests for the round trip, then longer and longer ones for the
    bandwidth. LargePacketsLost where only the short ones are answered."""
    request = _Request(ask, back)
    request(0)  # which pages in the code of both ends
    trips = [request(0) for _ in range(_pings(request(0).seconds, seconds / 3))]
    round_trips = [trip.seconds for trip in trips]
    best = min(trips, key=lambda trip: trip.seconds)  # its clock offset has the smallest error (RFC 5905)
    sent, resent = resent_packets()
    try:
        bandwidth = _bandwidth(request, statistics.median(round_trips), seconds / 3)
    except LinkTimeout as error:
        if request.answered_tiles:
            raise
        raise LargePacketsLost(len(trips), path_mtu(host)) from error
    sent, resent = (after - before for after, before in zip(resent_packets(), (sent, resent), strict=True))
    return PathMeasurement(
        round_trip=statistics.median(round_trips),
        jitter=statistics.fmean(abs(a - b) for a, b in pairwise(round_trips)),
        offset=best.there - best.here - best.seconds / 2,
        bandwidth=bandwidth,
        mtu=path_mtu(host),
        resent=resent / sent if sent > 0 else None,
    )


class LargePacketsLost(LinkTimeout):
    """Of a path that carries short messages and no long one, as where a tunnel takes smaller packets than it says."""

    def __init__(self, short: int, mtu: int | None) -> None:
        packets = "" if mtu is None else f", in packets of {mtu} bytes"
        super().__init__(
            f"{short} short messages were answered, and none of {TILE_BYTES // 1024} KiB{packets}: large packets seem "
            "to be lost on the way",
            "Try a smaller mtu on both machines (`ip link set dev INTERFACE mtu 1280`): a tunnel or VPN between them "
            "may drop larger packets without a word",
        )


class _Trip(msgspec.Struct, frozen=True):
    """A request and its answer: the time here when it left, the time there, and how long it took in all."""

    here: float
    there: float
    seconds: float


class _Request:
    """Sends one request after another over a pair of wires, each followed by some tiles, and waits for the answer.

    `answered_tiles`: of the requests that were answered.
    """

    def __init__(self, ask: Link, back: Link) -> None:
        self._ask, self._back = ask, back
        self._tile = torch.arange(TILE_BYTES, dtype=torch.int32).to(torch.uint8)
        self.answered_tiles = 0

    def __call__(self, tiles: int) -> _Trip:
        here, begun = time.time(), time.perf_counter()
        self._ask.send_bytes(REQUEST.pack(tiles))
        for _ in range(tiles):
            self._ask.send(self._tile)
        there: float = TIME.unpack(self._back.recv_bytes(TIME.size))[0]
        self.answered_tiles += tiles
        return _Trip(here, there, time.perf_counter() - begun)


def _pings(round_trip: float, seconds: float) -> int:
    return max(5, min(MAX_PINGS, int(seconds / max(round_trip, 1e-6))))


def _bandwidth(request: _Request, round_trip: float, seconds: float) -> float:
    """Bytes per second one way, measured in about `seconds`. The number of tiles in a request grows until they take
    about a sixth of that.

    A connection that has just begun sends slowly (RFC 5681), so only the last and longest requests count: the median
    of three.
    """
    tiles, left = 1, seconds
    while True:
        rates = [_rate(request, tiles, round_trip)]
        taken = tiles * TILE_BYTES / rates[0]
        left -= taken
        if taken > 0.15 * seconds and left > 2 * taken:
            rates += [_rate(request, tiles, round_trip) for _ in range(2)]
        if taken > 0.15 * seconds or left < 2 * taken:
            return statistics.median(rates)
        tiles = max(tiles + 1, min(8 * tiles, int(rates[0] * seconds / 6 / TILE_BYTES)))


def _rate(request: _Request, tiles: int, round_trip: float) -> float:
    return tiles * TILE_BYTES / max(request(tiles).seconds - round_trip, 1e-9)
