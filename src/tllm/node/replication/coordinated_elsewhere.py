"""A cluster of this machine's that another one coordinates by now, and how it is found: by a command that is started
again, or by a process that was deposed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Deposed
from tllm.node.replication.known_replicas import REPLICAS_FILE, KnownReplicas

log = logging.getLogger("tllm.node")


class RunningCluster(msgspec.Struct, frozen=True):
    """A cluster of this machine's authority that another machine coordinates, at `address`."""

    address: Address
    authority: Authority
    known: KnownReplicas


class Succeeded(Deposed):
    """This process was deposed, and another one coordinates the `cluster`, which this machine can join as a node.

    Nodes that would join were told that the coordinator listens at `door`.
    """

    def __init__(self, deposed: Deposed, cluster: RunningCluster, door: Address) -> None:
        super().__init__(deposed.message, deposed.hint)
        self.cluster, self.door = cluster, door


def running_cluster(folder: Path, secret: bytes | None) -> RunningCluster | None:
    """The cluster that this folder is of, if it still runs. ClusterError where that cannot be told."""
    if not (folder / REPLICAS_FILE).exists():
        return None
    authority = Authority.open(folder) if secret is None else Authority.of_secret(secret)
    known = KnownReplicas(folder, authority)
    address = asyncio.run(known.coordinator())
    if address is None:
        log.warning("none of the machines that kept the state of cluster %s answers: begins anew", authority.cluster)
        return None
    return RunningCluster(address, authority, known)
