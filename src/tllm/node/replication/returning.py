"""A first machine that starts again while another coordinates: it returns to its cluster as one of the nodes."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.connection import Address, format_address
from tllm.cluster.join_token import JoinToken
from tllm.node.front_end.departure import Departure
from tllm.node.replication.coordinator_door import CoordinatorDoor
from tllm.node.replication.known_replicas import FIND_SECONDS, REPLICAS_FILE, KnownReplicas
from tllm.node.replication.replica_host import JoinedReplica, Successors
from tllm.node.worker import WorkerSettings, work

log = logging.getLogger("tllm.node")


class RunningCluster(msgspec.Struct, frozen=True):
    """A cluster of this machine's authority that another machine coordinates, at `address`."""

    address: Address
    authority: Authority
    known: KnownReplicas


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


def return_to(
    cluster: RunningCluster,
    listen: Address,
    departure: Departure,
    successors: Successors,
    settings: Mapping[str, Any],
) -> None:
    """Be a node of it until it ends or this one is told to leave, with an HTTP server if `departure` has one.

    `listen` is where nodes come to join: they are sent on from there, unless the port is 0. `successors` run the work
    if this node coordinates it again. `settings` are other fields of `WorkerSettings`.
    """
    log.warning(
        "cluster %s runs, coordinated at %s: joins it", cluster.authority.cluster, format_address(cluster.address)
    )
    if listen[1]:
        CoordinatorDoor(
            listen, cluster.authority, functools.partial(cluster.known.coordinator, FIND_SECONDS / 10)
        ).start()
    host, port = cluster.address
    token = str(JoinToken.of_authority(cluster.authority))
    worker = WorkerSettings(host=host, port=port, token=token, **settings)

    def make_replica(identity: Identity, host: str) -> JoinedReplica:
        cache = worker.weights_cache, worker.weights_cache_bytes
        return JoinedReplica(identity, host, successors, cache, cluster.known.keep)

    departure.run(lambda: work(worker, departure.front_end, make_replica))
