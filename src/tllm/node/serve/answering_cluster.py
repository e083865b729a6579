"""`AnsweringCluster`: nodes that hold one model together and answer training runs elsewhere, with a teacher's
log-probabilities or with completions (`tllm teach --nodes`, `tllm rollout --nodes`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.messages import Prepared
from tllm.cluster.settings import AnswerSettings
from tllm.core.errors import ClusterError, TllmError
from tllm.hub.repository import HubWeights
from tllm.node.coordinator.cluster_options import ClusterOptions, OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.forming import forming, local_names, open_authority
from tllm.node.coordinator.losses import Loss
from tllm.node.coordinator.plan_selection import PlanChoice
from tllm.node.coordinator.workload import Workload
from tllm.node.machine.process_facts import reachable
from tllm.node.recovery.recovery import Policy, Recovery
from tllm.planner.cost.cache_room import RUNTIME_BYTES, check_machines
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.search.replan import replan
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.rollout_servers.base_digest import has_weights


@dataclass(frozen=True)
class Answerers:
    """What the nodes are to answer with: a model in a `role`, divided by a `plan`, with what a teacher's `dtype` is.

    `name` is how the model was asked for. Runs that have the `secret`, a file here, reach the first node, which is a
    worker of this machine, at `address`. Weights on the `hub` need not be in the model's folder.
    """

    role: RoleName
    name: str
    model: AnsweringModel
    plan: Plan
    address: Address
    secret: Path
    dtype: str = ""
    hub: HubWeights | None = None

    def workload(self, options: ClusterOptions) -> Workload:
        """The same as a coordinator takes it. PlanError where the plan does not fit the model."""
        self.plan.check(self.model.spec.num_layers)
        host, port = self.address
        settings = AnswerSettings(
            role=self.role,
            model=self.name,
            vocabulary=vocabulary_digest(self.model.folder),
            dtype=self.dtype,
            host=host,
            port=port,
            secret=str(self.secret.resolve()),
            threads=0,
        )
        comes_from_runs = self.role == "rollout" and self.hub is None and not has_weights(self.model.folder)
        return Workload(
            None if comes_from_runs else self.model.folder,
            json.dumps(self.model.config),
            self.plan,
            settings,
            allow_mixed=options.allow_mixed,
            lost_after=options.lost_after,
            hub=self.hub,
        )


class AnsweringCluster:
    """A coordinator's job that outlives lost nodes: `recovery` begins the epochs. Runs that were answered when one was
    lost dial again, and ask again what they had asked.

    `failed` is done once the coordinator itself cannot go on, with why.
    """

    def __init__(
        self, work: Workload, authority: Authority, address: Address, first: Sequence[str], policy: Policy
    ) -> None:
        self.fault: TllmError | None = None
        self.failed: asyncio.Future[TllmError] = asyncio.get_running_loop().create_future()
        self._spec = spec_from_config(json.loads(work.config))
        self.coordinator = Coordinator(self, work, authority, address, first)
        self.recovery = Recovery(self, self.coordinator, policy)

    @property
    def is_idle(self) -> bool:
        """Never for certain: who answers at the moment is not known here."""
        return False

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and begin the first epoch on them, or on those that were chosen."""
        nodes = await self.coordinator.choose(await self.coordinator.wait_for_nodes(seconds), on_progress)
        await self.recovery.begin(nodes, on_progress)

    def answered(self) -> tuple[str, Mapping[str, float], int | None]:
        """By which plan runs are answered now, what its first rank tells of its answers (`TimedAnswerer`), and the most
        memory in bytes that any rank has held."""
        ranks = self.coordinator.state.ranks
        most = max((member.beat.peak_bytes for member in ranks), default=None)
        return str(self.coordinator.state.plan), ranks[0].beat.stats if ranks else {}, most

    def fail(self, error: TllmError) -> None:
        self.fault = error
        if not self.failed.done():
            self.failed.set_result(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: each rank checks its own part when it reads it."""

    def acts(self, node: str) -> Mapping[type, Act]:
        """None: runs are answered by the nodes themselves."""
        return {}

    def adopt(self, work: Workload) -> Workload:
        return work

    def before_epoch(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Nothing: `plan_on` has looked for room."""

    def resume(self) -> None:
        self.fault = None

    def give_up(self, error: TllmError) -> None:
        """Runs wait, and the next node that joins opens it again."""
        self.fault = error

    def survives(self, error: TllmError) -> bool:
        """Always: what another node fails of may be its own."""
        return True

    def interrupted(self, loss: Loss | None) -> None:
        """Nothing: runs ask again in the next epoch."""

    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        """With the first rank on the first worker of this machine, where runs look for it. ClusterError while that one
        is not here."""
        first = self.coordinator.first[0]
        if all(member.node != first for member in self.coordinator.state.living):
            raise ClusterError(f"{first}, which runs reach, is not here", "it is started again")
        plan = replan(self.coordinator.work.plan, taken)
        others = [node for node in taken.values() if node != first]
        nodes = (first, *others[: plan.world_size - 1])
        self._check_room(plan, nodes)
        return plan, nodes

    def _check_room(self, plan: Plan, nodes: Sequence[str]) -> None:
        """CapacityError where nodes lack the memory for a teacher's weights. What a policy takes, its runs say."""
        settings = self.coordinator.work.settings
        assert isinstance(settings, AnswerSettings), "answering stays answering"
        if settings.role == "teacher":
            rooms = {member.node: member.facts.room for member in self.coordinator.state.living}
            needs = [rank.weights + RUNTIME_BYTES for rank in rank_bytes(self._spec, plan, settings.dtype)]
            check_machines(needs, [rooms[node] for node in nodes])


@contextlib.asynccontextmanager
async def open_answering(
    answerers: Answerers, options: ClusterOptions, policy: Policy = "replan", choice: PlanChoice | None = None
) -> AsyncIterator[AnsweringCluster]:
    """A cluster that answers runs, ended with the block. `policy` is for nodes that are lost: go on with those that are
    left, or wait for others. With a `choice` the plan only says for how many nodes to wait; theirs is chosen when they
    are here."""
    work = answerers.workload(options)
    nodes = local_names(work.plan, options.local)
    assert nodes, "runs reach a worker of this machine"
    authority = await open_authority(options.authority, options.secret)
    cluster = AnsweringCluster(work, authority, options.address, nodes, policy)
    cluster.coordinator.selection.choice = choice
    async with forming(cluster, nodes, reachable(options.address[0]), options):
        if cluster.coordinator.local is not None:
            cluster.coordinator.local.renew()
        yield cluster
