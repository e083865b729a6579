"""`Doctor`: a cluster that is only examined. Its nodes measure themselves, and then the network paths one by one."""

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
from tllm.cluster.state import ClusterState
from tllm.core.errors import ClusterError, TllmError, decoded
from tllm.node.coordinator.cluster_options import DEFAULTS, LINKS_MEASURED, ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.forming import forming, local_names, open_authority
from tllm.node.coordinator.workload import Workload
from tllm.node.machine.machine_facts import ClusterProbe, NetworkPath, NodeProbe
from tllm.node.machine.process_facts import reachable
from tllm.spec.plan import Plan

MEASURE_SECONDS, WAY_SECONDS = 6.0, 2.0
LINK_SECONDS = 20.0  # for a tile on a very slow line
LATE_SECONDS = 60.0  # how much longer than it should a measurement may take

Measured = TypeVar("Measured", NodeProbe, NetworkPath)

_FINDINGS: msgspec.json.Decoder[NodeProbe | NetworkPath] = msgspec.json.Decoder(NodeProbe | NetworkPath)


class Doctor:
    """A coordinator's job in which the nodes only measure. One node that fails ends it with its error; a network path
    that cannot be measured is a result as any other."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        assert isinstance(work.settings, DoctorSettings), "an examination"
        self.settings = work.settings
        self._answers: dict[str, asyncio.Queue[NodeProbe | NetworkPath | TllmError]] = {}
        self.fault: TllmError | None = None
        self.coordinator = Coordinator(self, work, authority, address, first)

    @property
    def state(self) -> ClusterState:
        return self.coordinator.state

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        await self.coordinator.form(seconds, on_progress)

    async def probe(self, on_progress: OnProgress | None = None) -> ClusterProbe:
        """What all nodes measure of themselves at the same time, then each network path in turn, so that none disturbs
        another."""
        ranks = range(self.coordinator.work.plan.world_size)
        nodes = await asyncio.gather(*(self.probe_node(rank) for rank in ranks))
        paths, pairs = [], list(permutations(ranks, 2))
        for done, (source, target) in enumerate(pairs):
            if on_progress is not None:
                on_progress(LINKS_MEASURED, done, len(pairs))
            paths.append(await self.probe_path(source, target))
        if on_progress is not None and pairs:
            on_progress(LINKS_MEASURED, len(pairs), len(pairs))
        return ClusterProbe(tuple(nodes), tuple(paths))

    async def probe_node(self, rank: int) -> NodeProbe:
        """What a rank measures of itself."""
        return await self._ask(rank, rank, self.settings.measure_seconds, NodeProbe)

    async def probe_path(self, source: int, target: int) -> NetworkPath:
        """The network path from one rank to another."""
        return await self._ask(source, target, self.settings.way_seconds, NetworkPath)

    def fail(self, error: TllmError) -> None:
        """End the examination with this."""
        self.fault = error
        for queue in self._answers.values():
            queue.put_nowait(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: no rank holds anything."""

    def acts(self, node: str) -> Mapping[type, Act]:
        async def news(message: News) -> None:
            self._queue(node).put_nowait(
                decoded(message.content, _FINDINGS, f"{node} sent findings that are none", ClusterError)
            )

        return {News: news}

    def adopt(self, work: Workload) -> Workload:
        return work

    async def _ask(self, rank: int, target: int, seconds: float, wanted: type[Measured]) -> Measured:
        """Let a rank measure the path to a target, or itself."""
        node = self.state.ranks[rank].node
        if self.fault is not None or node not in self.coordinator.members.channels:
            raise self.fault or ClusterError(f"{node} is gone")
        self.coordinator.members.channels[node].post(Probe(target))
        try:
            async with asyncio.timeout(seconds + LATE_SECONDS):
                measured = await self._queue(node).get()
        except TimeoutError as error:
            raise ClusterError(f"{node} measured for more than {seconds:g} s", "see what keeps it busy") from error
        if isinstance(measured, TllmError):
            raise measured
        if not isinstance(measured, wanted):
            raise ClusterError(f"{node} sent a {type(measured).__name__} where a {wanted.__name__} was asked for")
        return measured

    def _queue(self, node: str) -> asyncio.Queue[NodeProbe | NetworkPath | TllmError]:
        return self._answers.setdefault(node, asyncio.Queue())


@contextlib.asynccontextmanager
async def open_doctor(
    nodes: int,
    options: ClusterOptions = DEFAULTS,
    *,
    measure_seconds: float = MEASURE_SECONDS,
    way_seconds: float = WAY_SECONDS,
) -> AsyncIterator[Doctor]:
    """An examination of so many nodes, which may run any version of the program, whatever the options say.

    `measure_seconds` is for each node to measure itself, `way_seconds` for each path between two.
    """
    settings = DoctorSettings(
        measure_seconds=measure_seconds,
        way_seconds=way_seconds,
        threads=0,
        link_seconds=options.links_wait(LINK_SECONDS),
    )
    plan = Plan.parse(f"pp={nodes}", nodes)  # a rank for each node; there is no model
    names = local_names(plan, options.local)
    work = Workload(None, "{}", plan, settings, allow_mixed=True, lost_after=options.lost_after)
    doctor = Doctor(work, await open_authority(options.authority), options.address, names)
    async with forming(doctor, names, reachable(options.address[0]), options):
        yield doctor
