"""`ClusterOptions`: how a cluster of nodes is opened, whatever it is then used for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tllm.cluster.connection import Address
from tllm.cluster.heartbeat import SILENCE_SECONDS
from tllm.cluster.http_messages import ServedModel
from tllm.node.sources.node_source import NodeSource
from tllm.node.topology.numa_binding import NumaBinding
from tllm.spec.lora.lora_config import ServedLoras

LOOPBACK: Address = ("127.0.0.1", 0)
"""Only this machine, on any free port."""

OnProgress = Callable[[str, int, int], None]
"""on_progress(what, done, in all): called while nodes load weights, in bytes, or measure, in things of `COUNTED`"""

NODES_MEASURED, LINKS_MEASURED = "nodes measured", "links measured"
COUNTED = frozenset({NODES_MEASURED, LINKS_MEASURED})
"""What `on_progress` is told of that is not bytes."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which nodes form a cluster, and how long they wait for each other. `open_cluster`, `open_training` and the other
    functions that open a cluster take one. All times are in seconds.

    local: how many workers to start as processes of this machine; None starts one for each rank of the plan. The other
        ranks wait for nodes that join from elsewhere.
    threads: how many threads each local worker computes with; 0 divides the processors of this machine among them.
    address: host and port of the control server. Other machines can join only if it is not a loopback address. Port 0
        takes any free port.
    authority: the folder that keeps the cluster's certificate authority, so that nodes find a later coordinator of
        the same cluster again; None makes an authority that is kept in memory only.
    allow_mixed: accept nodes that run another version of the program than the coordinator.
    secret: whoever knows these bytes may join, as often as they like, and the cluster's authority is made from them;
        `authority` is then not read. None: only by tokens that the coordinator gives out.
    source: brings the nodes from elsewhere; asked in the beginning, and again when such a node was lost and may be
        replaced. None: they know where to go.
    on_progress: called while ranks load. None calls nothing.
    join_seconds: how long to wait for the nodes that join from elsewhere; None waits for ever.
    link_seconds: how long a rank waits for a message of another rank before it takes the link for broken; None is the
        default of the work (30 to serve, 600 to train, 20 to examine). At least twice `lost_after` is taken, so that
        a node that fell silent is named before its neighbours give up.
    lost_after: a node that has sent no heartbeat for so long is lost.
    spare_nodes: how many nodes may join beside those that the plan needs.
    memory: bytes that all local workers together may use; None is all of the machine's memory.
    device: what local workers compute on, as `--device` has it; without an index each has the next one of its kind.
    numa_binding: which processors each local worker runs on, of those that this process may use. "exclusive": cores of
        its own, on one NUMA node where there is room; "node": those of that node, with the others there; "none": any.
        "auto": "exclusive" on a machine of several NUMA nodes where no other run has bound its workers, else "none".
    replicas: how many processes, this one included, are to know the coordinator's state, so that one of them takes
        over when this process dies: as many as there are, an odd number. 1: only this process knows it, and the cluster
        ends with it. To serve, and to train where a lost node does not end the run.
    successor_seconds: how long this process, if it was deposed, looks for the one that coordinates then, to join it as
        a node. 0: it does not join.
    served: what HTTP servers serve, here and on nodes, but for the longest sequence; None where none do. To serve.
    adapters: LoRA adapters that these serve, to begin with; None where they serve none.
    """

    local: int | None = None
    threads: int = 0
    address: Address = LOOPBACK
    authority: Path | None = None
    allow_mixed: bool = False
    secret: bytes | None = field(default=None, repr=False)
    source: NodeSource | None = None
    on_progress: OnProgress | None = None
    join_seconds: float | None = None
    link_seconds: float | None = None
    lost_after: float = SILENCE_SECONDS
    spare_nodes: int = 0
    memory: int | None = None
    device: str = "cpu"
    numa_binding: NumaBinding = "auto"
    replicas: int = 1
    successor_seconds: float = 0.0
    served: ServedModel | None = None
    adapters: ServedLoras | None = None

    def links_wait(self, default: float) -> float:
        """The seconds of `link_seconds`, or the work's `default`: longer than a silent node is waited for, so that the
        node is named and not its neighbour."""
        return max(default if self.link_seconds is None else self.link_seconds, 2 * self.lost_after)


DEFAULTS = ClusterOptions()
"""Everything on this machine: one worker for each rank."""
