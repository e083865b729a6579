"""A survey: before there is a plan, the nodes that are here measure themselves with the model, and the ways between."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import msgspec

from tllm.cluster.messages import Findings, NodeFacts, Probe
from tllm.cluster.settings import SurveySettings
from tllm.core.errors import UNREADABLE, ClusterError
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.membership import Membership
from tllm.node.coordinator.survey_paths import met_ways
from tllm.node.machine.machine_facts import NetworkPath
from tllm.node.roles.sum_latency import Met
from tllm.planner.measured.survey import Goal, Survey, SurveyedNode, SurveyedPath, digest
from tllm.spec.model_spec import ModelSpec

LATE_SECONDS = 60.0  # how much longer than it should a measurement may take

Found = TypeVar("Found", SurveyedNode, NetworkPath, Met)


@dataclass(frozen=True)
class SurveyRequest:
    """What is to be surveyed, and how; `known` is a survey that was kept: of the same nodes it counts again."""

    spec: ModelSpec
    goal: Goal
    settings: SurveySettings
    known: Survey | None = None

    def ordered(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes as they stand in the survey that was kept, if they are the same: each gets the rank that it had."""
        before = tuple(node.node for node in self.known.nodes) if self.known is not None else ()
        return before if sorted(before) == sorted(nodes) else nodes

    def recalled(self, facts: Sequence[NodeFacts]) -> Survey | None:
        """The survey that was kept, if these are its nodes; by the names that they have now."""
        machines = [(one.host_name, one.cores) for one in facts]
        if self.known is None or not self.known.is_of(self.spec, self.goal, self.settings.dtype, machines):
            return None
        return self.known.named([one.node for one in facts])


def _is_in_turn(settings: SurveySettings) -> bool:
    """Whether nodes of one machine, which share its memory, will work in turn: one request goes from one to the next.
    So they are measured."""
    return settings.sequences == (1,)


def in_time(settings: SurveySettings, hosts: Sequence[str]) -> SurveySettings:
    """The same where nodes of one machine that are measured in turn have its time together."""
    most = max(Counter(hosts).values()) if _is_in_turn(settings) else 1
    return msgspec.structs.replace(settings, measure_seconds=settings.measure_seconds / most)


class Examiner:
    """Asks the ranks of an epoch for what they measure."""

    def __init__(self, members: Membership, settings: SurveySettings) -> None:
        self._members, self._settings = members, settings
        self._found: dict[str, asyncio.Queue[SurveyedNode | NetworkPath | Met]] = {}

    def take(self, node: str, message: Findings) -> None:
        """What a node has found. ClusterError for what is no finding."""
        try:
            found = msgspec.json.decode(message.content, type=SurveyedNode | NetworkPath | Met)
        except UNREADABLE as error:
            raise ClusterError(f"{node} sent findings that are none: {error}") from error
        self._queue(node).put_nowait(found)

    async def survey(
        self, nodes: Sequence[str], hosts: Sequence[str], asked: SurveyRequest, on_progress: OnProgress | None = None
    ) -> Survey:
        """What all nodes, each on a host, measure of themselves, then each way in turn; then they are free again.

        A way and the way back are measured at once: ranks that sum send both ways, and a processor seals and opens.
        """
        found = await self._examined(nodes, hosts)
        ways, pairs = list[SurveyedPath](), list(combinations(range(len(nodes)), 2))
        for done, (one, other) in enumerate(pairs):
            if on_progress is not None:
                on_progress("links", done, len(pairs))
            both = await asyncio.gather(self._way(nodes, one, other), self._way(nodes, other, one))
            met = await self._met(nodes, both)
            ways += met_ways(asked.spec, self._settings, (found[one], found[other]), both, met)
        for node in nodes:
            self._members.channels[node].post(Probe(None))
        dtype = self._settings.dtype
        return Survey(model=digest(asked.spec), goal=asked.goal, dtype=dtype, nodes=tuple(found), paths=tuple(ways))

    async def _examined(self, nodes: Sequence[str], hosts: Sequence[str]) -> list[SurveyedNode]:
        """All at the same time, or those of one host in turn."""
        free = defaultdict[str, asyncio.Lock](asyncio.Lock)

        async def examined(rank: int, host: str) -> SurveyedNode:
            async with free[host if _is_in_turn(self._settings) else nodes[rank]]:
                return await self._ask(nodes[rank], rank, self._settings.measure_seconds, SurveyedNode)

        return await asyncio.gather(*(examined(rank, host) for rank, host in enumerate(hosts)))

    async def _way(self, nodes: Sequence[str], source: int, target: int) -> SurveyedPath:
        way = await self._ask(nodes[source], target, self._settings.way_seconds, NetworkPath)
        if way.measured is None:
            raise ClusterError(
                f"no way from {nodes[source]} to {nodes[target]}: {way.fault}", "`tllm doctor` says more"
            )
        return SurveyedPath(source, target, way.measured.round_trip / 2, way.measured.bandwidth)

    async def _met(self, nodes: Sequence[str], both: Sequence[SurveyedPath]) -> list[Met]:
        """What either end of a way and the way back finds, at the same time."""
        seconds = self._settings.way_seconds
        asked = (self._ask(nodes[way.source], way.target, seconds, Met, meet=True) for way in both)
        return await asyncio.gather(*asked)

    async def _ask(self, node: str, target: int, seconds: float, wanted: type[Found], meet: bool = False) -> Found:
        """Let a node measure itself, or the way to a target; ClusterError when it is gone or late."""
        self._members.channels[node].post(Probe(target, meet))
        answer = asyncio.create_task(self._queue(node).get())
        gone = asyncio.create_task(self._members.until(lambda: not self._members.is_here(node)))
        try:
            await asyncio.wait((answer, gone), timeout=seconds + LATE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                what = "is gone" if gone.done() else f"measured for more than {seconds:g} s"
                raise ClusterError(f"{node} {what}", "see what it does, or give --plan: then nothing is measured")
            found = answer.result()
        finally:
            answer.cancel()
            gone.cancel()
        if not isinstance(found, wanted):
            raise ClusterError(f"{node} sent a {type(found).__name__} where a {wanted.__name__} was asked for")
        return found

    def _queue(self, node: str) -> asyncio.Queue[SurveyedNode | NetworkPath | Met]:
        return self._found.setdefault(node, asyncio.Queue())
