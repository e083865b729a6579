"""`ControlledNode`, `HttpDoor` and `ReplicaHost`: what the control thread (`Control`) asks of its node's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from tllm.cluster.channel import Act, Channel
from tllm.cluster.messages import (
    AdapterReady,
    Assign,
    Heartbeat,
    LoadAdapter,
    ReplicaPlace,
    RoleTaken,
    ServeReplica,
)
from tllm.engine.driver import Command


class ControlledNode(Protocol):
    """What the control thread asks of its node; the main thread computes meanwhile."""

    @property
    def outlives(self) -> bool:
        """Whether the node is worth something to another coordinator when this one is lost."""

    @property
    def ends_with_starter(self) -> bool:
        """Whether the system tells it at once when its coordinator is gone, by the input that it has from there."""

    def last_place(self) -> tuple[int, int | None]:
        """The last epoch that it had a part in, and its rank there."""

    def role_taken(self) -> RoleTaken | None:
        """The role that it has beside any plan."""

    def heartbeat(self) -> Heartbeat:
        """How it is, for the coordinator."""

    def command(self, command: Command) -> None:
        """Give this to the driver, if it has one."""

    def load_adapter(self, message: LoadAdapter) -> AdapterReady:
        """Load an adapter, in a thread of its own. ClusterError where this node serves nothing."""

    def supersede(self, assign: Assign) -> None:
        """Wake the main thread, whatever it waits for: what it does is for an epoch that is over."""

    def interrupt(self) -> None:
        """Wake the main thread, should it wait for other nodes, or answer a run: it is to end what it does at once."""


class HttpDoor(Protocol):
    """What the control thread asks of the node's HTTP server, where it has one."""

    def attached(self, channel: Channel) -> None:
        """This is the coordinator from now on."""

    def detached(self) -> None:
        """The coordinator is lost."""

    def acts(self) -> Mapping[type, Act]:
        """What to do with its messages."""


class ReplicaHost(Protocol):
    """Holds a replica of the coordinator's state in a node's process, and takes the coordinator's place if it is to."""

    async def serve(self, asked: ServeReplica) -> ReplicaPlace:
        """Begin, if it has not begun. It belongs to the loop of the control thread. ConfigError for files that are not
        here."""

    async def hand_over(self) -> bool:
        """If this process coordinates, let another do so, which does not wait for this node; whether it did."""

    def known(self, places: tuple[ReplicaPlace, ...]) -> None:
        """The coordinator says where the replicas are."""

    async def close(self) -> None:
        """End."""


class Beside(NamedTuple):
    """What runs in a node's process beside its part, where it is wanted: an HTTP server, and a replica of the
    coordinator's state by which the node may take the coordinator's place."""

    http: HttpDoor | None = None
    replica: ReplicaHost | None = None
