"""`Surveying`: a cluster that measures its nodes and the ways between them, for a plan, and ends."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.messages import Prepared
from tllm.core.errors import TllmError
from tllm.node.coordinator.coordinator import Coordinator, Tell, Workload
from tllm.node.coordinator.forming import LOOPBACK, Invite, forming, local_names, open_authority
from tllm.node.coordinator.survey import SurveyRequest
from tllm.node.machine.process_facts import cores, reachable
from tllm.node.roles.survey_rank import examined
from tllm.planner.measured.survey import Survey, digest
from tllm.spec.plan import Plan


class Surveying(Coordinator):
    """Has formed when all is measured."""

    def __init__(
        self, work: Workload, asked: SurveyRequest, authority: Authority, address: Address, first: Sequence[str]
    ) -> None:
        self.asked = asked
        super().__init__(work, authority, address, first)

    async def form(self, seconds: float | None = None, tell: Tell | None = None) -> None:
        self.survey = await self.surveyed(await self.wait_for_nodes(seconds), self.asked, tell)

    def fail(self, error: TllmError) -> None:
        """Nobody waits but `form`, which hears of it itself."""
        self.fault = error

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: no rank holds anything."""


async def survey_nodes(
    asked: SurveyRequest,
    config: str,
    nodes: int,
    *,
    local: int | None = None,
    threads: int = 0,
    address: Address = LOOPBACK,
    invite: Invite | None = None,
    tell: Tell | None = None,
) -> Survey:
    """Survey so many nodes, `local` of them processes here; the rest is as for `open_cluster`."""
    plan = Plan.parse(f"pp={nodes}", nodes)  # a rank for each node
    names = local_names(plan, local)
    work = Workload(None, config, plan, asked.settings)
    coordinator = Surveying(work, asked, await open_authority(None), address, names)
    async with forming(coordinator, names, reachable(address[0]), threads, invite, tell, None):
        assert coordinator.survey is not None, "it has formed"
        return coordinator.survey


def survey_here(asked: SurveyRequest, threads: int = 0) -> Survey:
    """This process alone: as it was kept, else as it measures itself now, on so many threads (0: as it is)."""
    machine, dtype = (socket.gethostname(), cores()), asked.settings.dtype
    if asked.known is not None and asked.known.is_of(asked.spec, asked.goal, dtype, [machine]):
        return asked.known
    if threads:
        torch.set_num_threads(threads)
    node = examined("here", asked.spec, asked.settings)
    return Survey(model=digest(asked.spec), goal=asked.goal, dtype=dtype, nodes=(node,))
