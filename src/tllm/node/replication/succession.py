"""Succession: a node's process opens its cluster anew from the state that was replicated, and coordinates it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import format_address
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.replicated_state import ReplicatedState, ReplicatedWork
from tllm.core.errors import TllmError
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery.recovery import Policy, Recovery
from tllm.node.replication.coordinator_replication import CoordinatorReplication
from tllm.node.replication.replicated_work import workload_of

log = logging.getLogger("tllm.node")

END_SECONDS = 5.0
"""How long nodes may take to go, once they are told that the work has ended."""

OnBegin = Callable[[Coordinator], None]
"""on_begin(coordinator): called with the coordinator that this process runs from now on"""


class SuccessorJob(Protocol):
    """What a coordinator that took over brings the nodes together for."""

    recovery: Recovery

    @property
    def coordinator(self) -> Coordinator: ...


Work = Callable[[asyncio.Event], Awaitable[bool]]
"""work(opened): what this process does beside coordinating, from its first moment on; whether the nodes' work has then
ended, and the cluster with it. `opened` is set once the ranks are ready."""


@dataclass(frozen=True)
class Office:
    """What a process takes the coordinator's place with: its replica, which leads, and what is this machine's own.

    `node` is the name of its own worker, and `host` where other nodes reach it. What it fetches from the hub is kept in
    `weights_cache`, of so many bytes.
    """

    replica: Replica
    node: str
    host: str
    weights_cache: tuple[str, int]
    on_begin: OnBegin

    @property
    def state(self) -> ReplicatedState:
        """What was agreed on before."""
        return self.replica.state

    @property
    def authority(self) -> Authority:
        """That of the cluster."""
        key = self.state.authority
        assert key is not None, "a coordinator says it before it has nodes"
        return Authority.restore(key.certificate, key.key)

    @property
    def policy(self) -> Policy:
        """What is done about a lost node."""
        return self._work.policy

    def workload(self) -> Workload:
        """What the nodes run, as this machine coordinates it."""
        return workload_of(self._work, *self.weights_cache)

    async def coordinate(self, job: SuccessorJob, work: Work) -> None:
        """Coordinate the cluster until the replica leads no more: then Deposed is raised; or until `work` has ended it.

        Nodes that were in the last plan keep their ranks, and what they have in memory. A TllmError or an OSError of
        what runs here is raised as it is: this process cannot coordinate, and another may.
        """
        coordinator, state = job.coordinator, self.state
        coordinator.resume(state.epoch, state.tokens)
        coordinator.replication = CoordinatorReplication(
            self.replica, coordinator, self.authority, self.host, self.policy, self._work.replicas
        )
        self.on_begin(coordinator)
        where, term = format_address((self.host, coordinator.control_server.port)), self.replica.term
        log.warning("takes over as coordinator of cluster %s at %s, in term %d", state.cluster, where, term)
        try:
            async with asyncio.TaskGroup() as tasks:
                opened = asyncio.Event()
                running = tasks.create_task(coordinator.run())
                opening = tasks.create_task(_open(job, state, opened))
                if await work(opened):
                    await _end(coordinator)
                    running.cancel()
                    opening.cancel()
        except ExceptionGroup as group:
            told = [error for error in group.exceptions if isinstance(error, TllmError | OSError)]
            raise min(told, key=lambda error: not isinstance(error, Deposed), default=group) from None
        finally:
            coordinator.members.abandon()
            coordinator.control_server.close()

    @property
    def _work(self) -> ReplicatedWork:
        assert self.state.work is not None, "a coordinator says it before it has nodes"
        return self.state.work


async def _open(job: SuccessorJob, state: ReplicatedState, opened: asyncio.Event) -> None:
    """Wait for the nodes that are left, and let the next epoch begin."""
    began, members = time.monotonic(), job.coordinator.members
    expected = set(state.ranks) - set(state.own)

    def have_come() -> bool:
        return expected <= {member.node for member in members.state.living}

    # A node may notice only by silence that the coordinator before is gone.
    await job.recovery.until(have_come, job.coordinator.work.lost_after)
    job.recovery.take_up()
    await job.recovery.until(lambda: job.recovery.is_open)
    seconds = time.monotonic() - began
    log.warning("has taken over: epoch %d is ready, %.1f s after it was elected", members.state.epoch, seconds)
    opened.set()


async def _end(coordinator: Coordinator) -> None:
    """End the cluster on purpose, and let its nodes go."""
    if coordinator.replication is not None:
        await coordinator.replication.end()
    coordinator.members.end()
    until = time.monotonic() + END_SECONDS
    while coordinator.members.channels and time.monotonic() < until:
        await asyncio.sleep(0.05)  # nodes close them, each when it has ended
