"""A survey: before there is a plan, the nodes measure themselves with the model, and the network paths between them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import msgspec

from tllm.cluster.channel import Channel
from tllm.cluster.messages import Findings, NodeFacts, Probe
from tllm.cluster.settings import SurveySettings
from tllm.core.errors import ClusterError, decoded
from tllm.node.coordinator.cluster_options import LINKS_MEASURED, NODES_MEASURED, OnProgress
from tllm.node.coordinator.membership import Membership
from tllm.node.coordinator.survey_paths import paths_with_sums
from tllm.node.machine.machine_facts import NetworkPath
from tllm.node.roles.sum_latency import Met
from tllm.planner.measured.survey import Goal, Machine, Survey, SurveyedNode, SurveyedPath, digest
from tllm.spec.model_spec import ModelSpec

LATE_SECONDS = 60.0
"""How much longer than it should a measurement may take."""

HINT = "see what it does, or give --plan: then nothing is measured"

Result = TypeVar("Result", SurveyedNode, NetworkPath, Met)

_FINDINGS: msgspec.json.Decoder[SurveyedNode | NetworkPath | Met] = msgspec.json.Decoder(
    SurveyedNode | NetworkPath | Met
)


@dataclass(frozen=True)
class SurveyRequest:
    """What is to be surveyed, and how. `known` is a survey that was kept, which is used again if its nodes are here."""

    spec: ModelSpec
    goal: Goal
    settings: SurveySettings
    known: Survey | None = None

    def ordered(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes in the order of the survey that was kept, if they are the same: each gets the rank that it had."""
        before = tuple(node.node for node in self.known.nodes) if self.known is not None else ()
        return before if sorted(before) == sorted(nodes) else nodes

    def recalled(self, facts: Sequence[NodeFacts]) -> Survey | None:
        """The survey that was kept, if these are its nodes; by the names that they have now."""
        kept = self.kept([(node.host_name, node.cores, node.device) for node in facts])
        return None if kept is None else kept.named([node.node for node in facts])

    def kept(self, machines: Sequence[Machine]) -> Survey | None:
        """The survey that was kept, if it is of nodes of these machines, in this order, and has all that is asked."""
        known, settings = self.known, self.settings
        if known is None or not known.is_of(self.spec, self.goal, settings.dtype, machines):
            return None
        return known if known.has_measured(bool(settings.rollouts), settings.intra_host) else None


def _is_in_turn(settings: SurveySettings) -> bool:
    """Whether nodes of one machine are measured one after another.

    They are where a single request will go from one to the next, so that they do not compete for the machine's memory.
    """
    return settings.sequences == (1,)


def in_time(settings: SurveySettings, hosts: Sequence[str]) -> SurveySettings:
    """Settings by which nodes of one machine that are measured one after another take its time together."""
    nodes_of_one = max(Counter(hosts).values()) if _is_in_turn(settings) else 1
    return msgspec.structs.replace(settings, measure_seconds=settings.measure_seconds / nodes_of_one)


class Examiner:
    """Asks the ranks of an epoch for what they measure."""

    def __init__(self, members: Membership, settings: SurveySettings) -> None:
        self._members, self._settings = members, settings
        self._results: dict[str, asyncio.Queue[SurveyedNode | NetworkPath | Met]] = {}

    def take(self, node: str, message: Findings) -> None:
        """Take a result that a node sends. ClusterError if it cannot be read."""
        result = decoded(message.content, _FINDINGS, f"{node} sent findings that are none", ClusterError)
        self._queue(node).put_nowait(result)

    async def survey(
        self, nodes: Sequence[str], hosts: Sequence[str], asked: SurveyRequest, on_progress: OnProgress | None = None
    ) -> Survey:
        """What all nodes, of which `hosts` names the machines, measure of themselves and then of each pair of paths.

        Afterwards they are free again. The paths between two nodes are measured in both directions at once, as ranks
        that sum send in both, and each processor encrypts and decrypts.
        """
        tell = on_progress or (lambda what, done, total: None)
        measured = await self._measure_nodes(nodes, hosts, tell)
        paths, pairs = list[SurveyedPath](), list(combinations(range(len(nodes)), 2))
        tell(LINKS_MEASURED, 0, len(pairs))
        for done, (first, second) in enumerate(pairs, 1):
            both = await asyncio.gather(
                self._measure_path(nodes, first, second), self._measure_path(nodes, second, first)
            )
            sums = await self._measure_sums(nodes, both)
            paths += paths_with_sums(asked.spec, self._settings, (measured[first], measured[second]), both, sums)
            tell(LINKS_MEASURED, done, len(pairs))
        for node in nodes:
            self._channel(node).post(Probe(None))
        return Survey(
            model=digest(asked.spec),
            goal=asked.goal,
            dtype=self._settings.dtype,
            nodes=tuple(measured),
            paths=tuple(paths),
            intra_host=self._settings.intra_host,
        )

    async def _measure_nodes(self, nodes: Sequence[str], hosts: Sequence[str], tell: OnProgress) -> list[SurveyedNode]:
        """All at the same time, or those of one host one after another."""
        free, done = defaultdict[str, asyncio.Lock](asyncio.Lock), 0
        tell(NODES_MEASURED, done, len(nodes))

        async def measure(rank: int, host: str) -> SurveyedNode:
            nonlocal done
            async with free[host if _is_in_turn(self._settings) else nodes[rank]]:
                measured = await self._ask(nodes[rank], rank, self._settings.measure_seconds, SurveyedNode)
            done += 1
            tell(NODES_MEASURED, done, len(nodes))
            return measured

        return await asyncio.gather(*(measure(rank, host) for rank, host in enumerate(hosts)))

    async def _measure_path(self, nodes: Sequence[str], source: int, target: int) -> SurveyedPath:
        path = await self._ask(nodes[source], target, self._settings.way_seconds, NetworkPath)
        if path.measured is None:
            raise ClusterError(
                f"no way from {nodes[source]} to {nodes[target]}: {path.fault}", "`tllm doctor` says more"
            )
        return SurveyedPath(source, target, path.measured.round_trip / 2, path.measured.bandwidth)

    async def _measure_sums(self, nodes: Sequence[str], both: Sequence[SurveyedPath]) -> list[Met]:
        """What each of two ranks measures of sums with the other, at the same time."""
        seconds = self._settings.way_seconds
        answers = (self._ask(nodes[path.source], path.target, seconds, Met, meet=True) for path in both)
        return await asyncio.gather(*answers)

    async def _ask(self, node: str, target: int, seconds: float, wanted: type[Result], meet: bool = False) -> Result:
        """Let a node measure itself, or the path to a target. ClusterError when it is gone or late."""
        self._channel(node).post(Probe(target, meet))
        answer = asyncio.create_task(self._queue(node).get())
        gone = asyncio.create_task(self._members.until(lambda: not self._is_examined(node)))
        try:
            await asyncio.wait((answer, gone), timeout=seconds + LATE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                if gone.done():
                    raise self._gone(node)
                raise ClusterError(f"{node} measured for more than {seconds:g} s", HINT)
            result = answer.result()
        finally:
            answer.cancel()
            gone.cancel()
        if not isinstance(result, wanted):
            raise ClusterError(f"{node} sent a {type(result).__name__} where a {wanted.__name__} was asked for")
        return result

    def _is_examined(self, node: str) -> bool:
        """Whether a node still has its part in the survey: not if it was lost, even if it has come anew since."""
        member = self._members.state.member(node)
        return member is not None and member.is_living and member.rank is not None

    def _channel(self, node: str) -> Channel:
        """ClusterError for a node that is gone."""
        if not self._is_examined(node):
            raise self._gone(node)
        return self._members.channels[node]

    def _gone(self, node: str) -> ClusterError:
        member = self._members.state.member(node)
        why = f": {member.reason}" if member is not None and member.reason else ""
        return ClusterError(f"{node} is gone{why}", HINT)

    def _queue(self, node: str) -> asyncio.Queue[SurveyedNode | NetworkPath | Met]:
        return self._results.setdefault(node, asyncio.Queue())
