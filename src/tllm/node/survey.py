"""A survey: before there is a plan, the nodes that are here measure themselves with the model, and the ways between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TypeVar

import msgspec

from tllm.cluster.messages import Findings, NodeFacts, Probe
from tllm.cluster.settings import SurveySettings
from tllm.ground.decode import UNREADABLE
from tllm.ground.errors import ClusterError
from tllm.node.doctor_facts import Way
from tllm.node.meetings import SHORT_BYTES, Met
from tllm.node.members import Members
from tllm.planner.sums import lost_in_meeting
from tllm.planner.survey import Between, Examined, Goal, Survey, digest
from tllm.spec.model import ModelSpec

LATE_SECONDS = 60.0  # how much longer than it should a measurement may take

Found = TypeVar("Found", Examined, Way, Met)
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Asked:
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


class Examiner:
    """Asks the ranks of an epoch for what they measure."""

    def __init__(self, members: Members, settings: SurveySettings) -> None:
        self._members, self._settings = members, settings
        self._found: dict[str, asyncio.Queue[Examined | Way | Met]] = {}

    def take(self, node: str, message: Findings) -> None:
        """What a node has found. ClusterError for what is no finding."""
        try:
            found = msgspec.json.decode(message.content, type=Examined | Way | Met)
        except UNREADABLE as error:
            raise ClusterError(f"{node} sent findings that are none: {error}") from error
        self._queue(node).put_nowait(found)

    async def survey(self, nodes: Sequence[str], asked: Asked, tell: Tell | None = None) -> Survey:
        """What all nodes measure of themselves, at the same time, then each way in turn; then they are free again.

        A way and the way back are measured at once: ranks that sum send both ways, and a processor seals and opens.
        """
        seconds = self._settings.measure_seconds
        found = await asyncio.gather(*(self._ask(node, rank, seconds, Examined) for rank, node in enumerate(nodes)))
        ways, pairs = list[Between](), list(combinations(range(len(nodes)), 2))
        for done, (one, other) in enumerate(pairs):
            if tell is not None:
                tell("links", done, len(pairs))
            both = await asyncio.gather(self._way(nodes, one, other), self._way(nodes, other, one))
            ways += await self._met(nodes, both)
        for node in nodes:
            self._members.channels[node].post(Probe(None))
        dtype = self._settings.dtype
        return Survey(model=digest(asked.spec), goal=asked.goal, dtype=dtype, nodes=tuple(found), ways=tuple(ways))

    async def _way(self, nodes: Sequence[str], source: int, target: int) -> Between:
        way = await self._ask(nodes[source], target, self._settings.way_seconds, Way)
        if way.measured is None:
            raise ClusterError(
                f"no way from {nodes[source]} to {nodes[target]}: {way.fault}", "`tllm doctor` says more"
            )
        return Between(source, target, way.measured.round_trip / 2, way.measured.bandwidth)

    async def _met(self, nodes: Sequence[str], both: Sequence[Between]) -> list[Between]:
        """The ways as sums find them: both at once, as ranks send that sum, or pass rows there and gradients back.

        Neither begins or ends when the other does: what one finds too fast the other finds too slow.
        """
        seconds = self._settings.way_seconds
        asked = (self._ask(nodes[way.source], way.target, seconds, Met, meet=True) for way in both)
        found = await asyncio.gather(*asked)
        turn, alone = min(one.turn for one in found), min(one.sum for one in found)
        works = found[0].work, found[1].work
        rate, brief = fmean(one.rate for one in found), fmean(one.brief for one in found)
        ways = [msgspec.structs.replace(way, bandwidth=rate, brief=brief) for way in both]
        return [
            msgspec.structs.replace(
                way,
                meeting=lost_in_meeting(turn, works, way.latency + SHORT_BYTES / way.bandwidth, alone),
                effort=one.effort,
            )
            for way, one in zip(ways, found, strict=True)
        ]

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

    def _queue(self, node: str) -> asyncio.Queue[Examined | Way | Met]:
        return self._found.setdefault(node, asyncio.Queue())
