"""`Doctor`: a cluster that is only looked at. Its nodes measure themselves, and one after another the ways between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import permutations
from typing import TypeVar

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.messages import News, Prepared, Probe
from tllm.cluster.settings import DoctorSettings
from tllm.core.errors import UNREADABLE, ClusterError, TllmError
from tllm.node.coordinator.cluster_options import DEFAULTS, ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator, Workload
from tllm.node.coordinator.forming import forming, local_names, open_authority
from tllm.node.machine.machine_facts import ClusterProbe, NetworkPath, NodeProbe
from tllm.node.machine.process_facts import reachable
from tllm.spec.plan import Plan

MEASURE_SECONDS, WAY_SECONDS = 6.0, 2.0
LINK_SECONDS = 20.0  # for a tile on a very slow line
LATE_SECONDS = 60.0  # how much longer than it should a measurement may take

Found = TypeVar("Found", NodeProbe, NetworkPath)


class Doctor(Coordinator):
    """One node that fails ends the visit with its error; a way that cannot be measured is a finding."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        assert isinstance(work.settings, DoctorSettings), "a visit"
        self.settings = work.settings
        self._found: dict[str, asyncio.Queue[NodeProbe | NetworkPath | TllmError]] = {}
        super().__init__(work, authority, address, first)

    async def visit(self, on_progress: OnProgress | None = None) -> ClusterProbe:
        """What all nodes say of themselves, at the same time, then each way in turn, so that none disturbs another."""
        ranks = range(self.work.plan.world_size)
        nodes = await asyncio.gather(*(self.node(rank) for rank in ranks))
        ways, pairs = [], list(permutations(ranks, 2))
        for done, (source, target) in enumerate(pairs):
            if on_progress is not None:
                on_progress("ways", done, len(pairs))
            ways.append(await self.way(source, target))
        if on_progress is not None and pairs:
            on_progress("ways", len(pairs), len(pairs))
        return ClusterProbe(tuple(nodes), tuple(ways))

    async def node(self, rank: int) -> NodeProbe:
        """What a rank says of itself."""
        return await self._ask(rank, rank, self.settings.measure_seconds, NodeProbe)

    async def way(self, source: int, target: int) -> NetworkPath:
        """The way from one rank to another."""
        return await self._ask(source, target, self.settings.way_seconds, NetworkPath)

    def fail(self, error: TllmError) -> None:
        """End the visit with this."""
        self.fault = error
        for queue in self._found.values():
            queue.put_nowait(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: no rank holds anything."""

    def acts(self, node: str) -> Mapping[type, Act]:
        async def news(message: News) -> None:
            self._queue(node).put_nowait(_decoded(message, node))

        return {**super().acts(node), News: news}

    async def _ask(self, rank: int, target: int, seconds: float, wanted: type[Found]) -> Found:
        """Let a rank measure the way to a target, or itself."""
        node = self.state.ranks[rank].node
        if self.fault is not None or node not in self.members.channels:
            raise self.fault or ClusterError(f"{node} is gone")
        self.members.channels[node].post(Probe(target))
        try:
            async with asyncio.timeout(seconds + LATE_SECONDS):
                found = await self._queue(node).get()
        except TimeoutError as error:
            raise ClusterError(f"{node} measured for more than {seconds:g} s", "see what keeps it busy") from error
        if isinstance(found, TllmError):
            raise found
        if not isinstance(found, wanted):
            raise ClusterError(f"{node} sent a {type(found).__name__} where a {wanted.__name__} was asked for")
        return found

    def _queue(self, node: str) -> asyncio.Queue[NodeProbe | NetworkPath | TllmError]:
        return self._found.setdefault(node, asyncio.Queue())


@contextlib.asynccontextmanager
async def open_doctor(
    nodes: int,
    options: ClusterOptions = DEFAULTS,
    *,
    measure_seconds: float = MEASURE_SECONDS,
    way_seconds: float = WAY_SECONDS,
) -> AsyncIterator[Doctor]:
    """A visit to so many nodes, which may run any version of the program, whatever the options say.

    `measure_seconds` is for each node to measure itself, `way_seconds` for each way between two.
    """
    settings = DoctorSettings(
        measure_seconds=measure_seconds,
        way_seconds=way_seconds,
        threads=0,
        link_seconds=LINK_SECONDS if options.link_seconds is None else options.link_seconds,
    )
    plan = Plan.parse(f"pp={nodes}", nodes)  # a rank for each node; there is no model
    names = local_names(plan, options.local)
    work = Workload(None, "{}", plan, settings, allow_mixed=True, lost_after=options.lost_after)
    doctor = Doctor(work, await open_authority(options.authority), options.address, names)
    async with forming(doctor, names, reachable(options.address[0]), options):
        yield doctor


def _decoded(message: News, node: str) -> NodeProbe | NetworkPath:
    try:
        return msgspec.json.decode(message.content, type=NodeProbe | NetworkPath)
    except UNREADABLE as error:
        raise ClusterError(f"{node} sent findings that are none: {error}") from error
