"""A cluster that measures its nodes and the network paths between them, to choose a plan by, and ends."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import msgspec
import torch

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.messages import Prepared
from tllm.core.errors import TllmError
from tllm.devices.choose import CPU, choose_device, compute_on
from tllm.devices.memory import device_name
from tllm.node.coordinator.cluster_options import DEFAULTS, ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.forming import forming, local_names, open_authority
from tllm.node.coordinator.survey import SurveyRequest
from tllm.node.coordinator.workload import Workload
from tllm.node.machine.process_facts import cores, reachable
from tllm.node.roles.survey_rank import examined
from tllm.planner.measured.survey import Survey, digest
from tllm.spec.plan import Plan


class SurveyJob:
    """Has formed when all is measured: then it has a `survey`. One node that fails ends it."""

    def __init__(
        self, work: Workload, asked: SurveyRequest, authority: Authority, address: Address, first: Sequence[str]
    ) -> None:
        self.fault: TllmError | None = None
        self.survey: Survey | None = None
        self._asked = asked
        self.coordinator = Coordinator(self, work, authority, address, first)

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        nodes = await self.coordinator.wait_for_nodes(seconds)
        self.survey = await self.coordinator.selection.measure(nodes, self._asked, on_progress)

    def fail(self, error: TllmError) -> None:
        """Nobody waits but `form`, which is told by itself."""
        self.fault = error

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: no rank holds anything."""

    def acts(self, node: str) -> Mapping[type, Act]:
        return {}

    def adopt(self, work: Workload) -> Workload:
        return work


async def survey_nodes(
    asked: SurveyRequest,
    config: str,
    nodes: int,
    options: ClusterOptions = DEFAULTS,
) -> Survey:
    """Survey so many nodes with a model, of which `config` is the text of the config.json."""
    plan = Plan.parse(f"pp={nodes}", nodes)  # a rank for each node
    names = local_names(plan, options.local)
    work = Workload(None, config, plan, asked.settings, allow_mixed=options.allow_mixed, lost_after=options.lost_after)
    job = SurveyJob(work, asked, await open_authority(options.authority), options.address, names)
    async with forming(job, names, reachable(options.address[0]), options):
        assert job.survey is not None, "it has formed"
        return job.survey


def survey_here(asked: SurveyRequest, threads: int = 0, device: str = "cpu") -> Survey:
    """This process alone: as it was kept, else as it measures itself now, on so many threads (0: as it is)."""
    own, settings = choose_device(device), asked.settings
    kept = asked.kept([(socket.gethostname(), cores(), "" if own == CPU else device_name(own))])
    if kept is not None:
        return kept
    if threads:
        torch.set_num_threads(threads)
    compute_on(own)
    node = examined("here", asked.spec, msgspec.structs.replace(settings, device=str(own)))
    return Survey(
        model=digest(asked.spec),
        goal=asked.goal,
        dtype=settings.dtype,
        nodes=(node,),
        intra_host=settings.intra_host,
    )
