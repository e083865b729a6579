"""`JoinedReplica`: the replica of the coordinator's state on a node that joined, and what that node does when it is
elected."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from tllm.cluster.certificates import Identity
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.messages import ReplicaPlace, ServeReplica
from tllm.cluster.settings import Settings
from tllm.core.errors import ConfigError, TllmError
from tllm.core.tasks import end_tasks
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.replication.succession import Office
from tllm.node.weights.model_folder import same_model

log = logging.getLogger("tllm.node")

OnReplicas = Callable[[tuple[ReplicaPlace, ...]], None]

Successor = Callable[[Office], Awaitable[None]]
"""successor(office): coordinates until the replica leads no more, which raises Deposed, or until the work has ended"""

Successors = Mapping[type[Settings], Successor]
"""The successor for each kind of work, by the type of its settings."""


def _forget(places: tuple[ReplicaPlace, ...]) -> None:
    """Nobody keeps where replicas are."""


class JoinedReplica:
    """The node's `ReplicaHost`. What it fetches from the hub as coordinator is kept in `weights_cache`, of so many
    bytes. One of the `successors` runs the work of a cluster that this process coordinates, and `on_replicas` is called
    with where the replicas are, whenever the coordinator says so."""

    def __init__(
        self,
        identity: Identity,
        host: str,
        successors: Successors,
        weights_cache: tuple[str, int] = ("", 0),
        on_replicas: OnReplicas = _forget,
    ) -> None:
        self._on_replicas = on_replicas
        self._identity, self._host, self._cache = identity, host, weights_cache
        self._successors = successors
        self._replica: Replica | None = None
        self._coordinator: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None

    async def serve(self, asked: ServeReplica) -> ReplicaPlace:
        check_readable(asked.files)
        await asyncio.to_thread(check_model, asked)
        if self._replica is None or self._task is None or self._task.done():
            if self._replica is not None:
                self._replica.close()
            # One that ended is another replica now: it must not vote again under the name that it had.
            timing = RaftTiming(election=asked.election_seconds)
            self._replica = Replica(self._identity, self._host, (self._host, 0), timing=timing)
            self._task = asyncio.create_task(self._run(self._replica), name="replica")
        return self._replica.place

    async def hand_over(self) -> bool:
        return self._coordinator is not None and await self._coordinator.hand_over((self._identity.name,))

    def known(self, places: tuple[ReplicaPlace, ...]) -> None:
        self._on_replicas(places)

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
        if self._replica is not None:
            self._replica.close()

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
            work = replica.state.work
            if replica.state.ended is not None or work is None:
                await replica.until(lambda: not replica.leads)
                continue
            try:
                succeed = self._successors[type(work.settings)]
                await succeed(Office(replica, self._identity.name, self._host, self._cache, self._coordinates))
            except Deposed as error:
                log.warning("%s", error.message)
            except (TllmError, OSError) as error:
                why = error.message if isinstance(error, TllmError) else error
                log.error("cannot take the coordinator's place: %s", why)
                replica.raft.resign(replica.now())
            finally:
                self._coordinator = None

    def _coordinates(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator


def check_model(asked: ServeReplica) -> None:
    """ConfigError, by the names of the folder and of this machine, where the model is not here."""
    if asked.model and same_model(Path(asked.folder), asked.model) is None:
        raise ConfigError(
            f"{asked.folder} on {socket.gethostname()} does not hold the model's files, and whoever coordinates gives "
            "other nodes of them",
            "let the model lie there by the same path, or give its name on the hub",
        )


def check_readable(files: Sequence[str]) -> None:
    """ConfigError, by the names of the file and of this machine, where one of these cannot be read here."""
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(
                f"{file} cannot be read on {socket.gethostname()}, in {os.getcwd()}, and whoever coordinates reads it",
                "let it lie there by the same path, or on a disk that the machines share",
            )
