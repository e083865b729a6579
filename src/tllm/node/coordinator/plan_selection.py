"""Choosing a plan for the nodes that are here, by what they are measured to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tllm.cluster.channel import Act
from tllm.cluster.messages import Findings, Outputs
from tllm.cluster.settings import SurveySettings
from tllm.core.errors import ClusterError
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.membership import Membership
from tllm.node.coordinator.survey import Examiner, SurveyRequest, in_time
from tllm.node.coordinator.weight_registry import WeightRegistry
from tllm.node.coordinator.workload import Workload
from tllm.planner.measured.survey import Survey
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class PlanChoice:
    """How the work is chosen when the nodes are here: what is asked of them, and what follows from their answers.

    `choose` gives the work, and who takes its ranks, in order, by the places of the nodes in the survey. `is_given`:
    it keeps the plan, for as many nodes as that has ranks, and only predicts its speed.
    """

    asked: SurveyRequest
    choose: Callable[[Survey], tuple[Workload, Sequence[int]]]
    is_given: bool = False


class BringUp(Protocol):
    """`Coordinator.bring_up`: begins an epoch in which the nodes measure."""

    def __call__(
        self, plan: Plan, nodes: Sequence[str], on_progress: OnProgress | None, survey: SurveySettings | None
    ) -> Awaitable[None]: ...


class PlanSelection:
    """`choice` is None where the plan is given; `survey` is what the choice was made by, once it was."""

    def __init__(self, members: Membership, weights: WeightRegistry, bring_up: BringUp) -> None:
        self.choice: PlanChoice | None = None
        self.survey: Survey | None = None
        self._members, self._weights, self._bring_up = members, weights, bring_up
        self._examiner: Examiner | None = None

    async def choose(
        self, nodes: tuple[str, ...], on_progress: OnProgress | None
    ) -> tuple[Workload | None, tuple[str, ...]]:
        """The work chosen by a survey of the nodes, and those that take its ranks, in order.

        Without a `choice` there is no new work, and the nodes are as given.
        """
        if self.choice is None:
            return None, nodes
        nodes = self.choice.asked.ordered(nodes)
        self.survey = self._weights.survey = await self.measure(nodes, self.choice.asked, on_progress)
        work, ranks = await asyncio.to_thread(self.choice.choose, self.survey)
        return work, tuple(nodes[rank] for rank in ranks)

    async def measure(self, nodes: Sequence[str], asked: SurveyRequest, on_progress: OnProgress | None) -> Survey:
        """The survey that was kept of these nodes, else what they measure now, in an epoch of its own."""
        members = {member.node: member.facts for member in self._members.state.living}
        memory = {node: facts.memory_bytes for node, facts in members.items()}
        if (known := asked.recalled([members[node] for node in nodes])) is not None:
            return known.within(memory)
        hosts = [members[node].host_name for node in nodes]
        settings = in_time(asked.settings, hosts)
        self._examiner = Examiner(self._members, settings)
        await self._bring_up(Plan.parse(f"pp={len(nodes)}", len(nodes)), nodes, on_progress, settings)
        survey = await self._examiner.survey(nodes, hosts, asked, on_progress)
        return survey.within(memory)

    def acts(self, node: str) -> Mapping[type, Act]:
        """What to do with what a node sends while it is surveyed."""

        async def findings(message: Findings) -> None:
            if self._examiner is None:
                raise ClusterError(f"{node} tells what it found in a survey that there is not")
            self._examiner.take(node, message)

        async def outputs(message: Outputs) -> None:
            if self._examiner is None:
                raise ClusterError(f"{node} sends tokens, and nothing is served")

        return {Findings: findings, Outputs: outputs}
