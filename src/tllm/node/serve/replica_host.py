"""`JoinedReplica`: a joined node's replica of the coordinator's state, and what it does when that is elected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from tllm.cluster.certificates import Identity
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.messages import ReplicaPlace
from tllm.core.errors import TllmError
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.replication.replicated_work import workload_of
from tllm.node.serve.takeover import OnTakeover, answer_nodes, take_over

log = logging.getLogger("tllm.node")

OnReplicas = Callable[[tuple[ReplicaPlace, ...]], None]


def _forget(places: tuple[ReplicaPlace, ...]) -> None:
    """Nobody keeps where replicas are."""


class JoinedReplica:
    """The node's `ReplicaHost`. What it fetches from the hub as coordinator is kept in `weights_cache`, of so many
    bytes. `on_takeover` is called with the cluster once this process coordinates it, and `on_replicas` with where the
    replicas are, whenever the coordinator says so."""

    def __init__(
        self,
        identity: Identity,
        host: str,
        weights_cache: tuple[str, int] = ("", 0),
        on_takeover: OnTakeover = answer_nodes,
        on_replicas: OnReplicas = _forget,
    ) -> None:
        self._on_replicas = on_replicas
        self._identity, self._host, self._cache = identity, host, weights_cache
        self._on_takeover = on_takeover
        self._replica: Replica | None = None
        self._coordinator: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None

    async def serve(self, election_seconds: float) -> ReplicaPlace:
        if self._replica is None or self._task is None or self._task.done():
            # One that ended is another replica now: it must not vote again under the name that it had.
            timing = RaftTiming(election=election_seconds)
            self._replica = Replica(self._identity, self._host, (self._host, 0), timing=timing)
            self._task = asyncio.create_task(self._run(self._replica), name="replica")
        return self._replica.place

    async def hand_over(self) -> bool:
        return self._coordinator is not None and await self._coordinator.hand_over((self._identity.name,))

    def known(self, places: tuple[ReplicaPlace, ...]) -> None:
        self._on_replicas(places)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, replica: Replica) -> None:
        """Take part, and coordinate whenever this replica leads. What goes wrong with it ends the replica alone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(replica.run())
                tasks.create_task(self._succeed(replica))
        except ExceptionGroup as group:
            log.error("this node's replica of the coordinator's state ended", exc_info=group)

    async def _succeed(self, replica: Replica) -> None:
        while True:
            await replica.until(lambda: replica.leads)
            if replica.state.ended is not None or replica.state.work is None:
                await replica.until(lambda: not replica.leads)
                continue
            try:
                work = workload_of(replica.state.work, *self._cache)
                await take_over(replica, work, self._host, self._coordinates, self._on_takeover)
            except Deposed as error:
                log.warning("%s", error.message)
            except TllmError as error:
                log.error("cannot take the coordinator's place: %s", error.message)
                replica.raft.resign(replica.now())
            finally:
                self._coordinator = None

    def _coordinates(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
