"""`NodeSource`: where the nodes of a cluster come from. A new engine is one module beside this.

Whatever brings them, nodes join in one way: with a token, at the coordinator's address (`tllm.cluster.join`). A source
only sees to it that processes come which know both. `tllm train` and `tllm serve` choose one; the coordinator asks it
for nodes when a cluster forms and when one was lost.

    `JoinLine`         somebody reads a line and runs it on other machines; so do pods that are told a secret
    `LaunchedTasks`    torchrun or srun has started the processes already, and they only need to be told
    `RayNodes`         Ray places an actor on a node of its cluster, and the actor starts a worker

Workers of the coordinator's own machine (`LocalWorkers`) are started, listed and ended beside these, and by name: they
take the first ranks, and one that ends is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tllm.core.errors import TllmError

if TYPE_CHECKING:
    from tllm.cluster.join_token import JoinToken

Labels = Mapping[str, str]
"""What an engine calls a node, and where it put it: for status, and nothing is decided by it."""

SayLine = Callable[[int, str, str], None]
"""say(count, HOST:PORT, token): called with what so many other machines need to join"""

OnFailure = Callable[[TllmError], None]
"""fail(error): called from any thread when a node cannot come, or its process has ended"""


class NodeSource(Protocol):
    """Brings nodes that are not workers of the coordinator's own machine."""

    def watch(self, fail: OnFailure) -> None:
        """Tell from now on what becomes known of nodes that do not come: a cluster that still forms is given up."""

    def start(self, count: int, address: str, token: str) -> None:
        """Let `count` nodes more join at HOST:PORT by this token, which is good for as many. Returns at once.

        ConfigError or ClusterError where it is known now that they cannot come.
        """

    def nodes(self) -> Mapping[str, Labels]:
        """The nodes that it knows by the name under which they join, whether they are here yet or not."""

    def stop(self) -> None:
        """The cluster has ended, and has told its nodes: give back all that was started."""


@dataclass(frozen=True)
class Invitation:
    """A source, the HOST:PORT of the coordinator that it tells, how many nodes at a time are to come by it, and the
    tokens that it was given for them."""

    source: NodeSource
    address: str
    nodes: int
    tokens: list[JoinToken] = field(default_factory=list)


class JoinLine:
    """Nodes that come by themselves, once somebody was told the line that they need."""

    def __init__(self, say: SayLine) -> None:
        self._say = say

    def watch(self, fail: OnFailure) -> None:
        """Nothing: who reads the line sees what becomes of it."""

    def start(self, count: int, address: str, token: str) -> None:
        self._say(count, address, token)

    def nodes(self) -> Mapping[str, Labels]:
        return {}

    def stop(self) -> None:
        """Nothing: nodes end with their coordinator."""
