"""A first machine that starts again while another coordinates, or that was deposed, rejoins its cluster as a node."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from tllm.cluster.certificates import Identity
from tllm.cluster.connection import Address, format_address
from tllm.cluster.join_token import JoinToken
from tllm.node.front_end.departure import Departure
from tllm.node.replication.coordinated_elsewhere import RunningCluster
from tllm.node.replication.coordinator_redirect import CoordinatorRedirect
from tllm.node.replication.known_replicas import FIND_SECONDS
from tllm.node.replication.replica_host import JoinedReplica, Successors
from tllm.node.worker import WorkerSettings, work

log = logging.getLogger("tllm.node")


def rejoin(
    cluster: RunningCluster,
    listen: Address,
    departure: Departure,
    successors: Successors,
    settings: Mapping[str, Any],
) -> bool:
    """Be a node of it until it ends or this one is told to leave, with an HTTP server if `departure` has one; False
    where its work is to go on another time.

    `listen` is where nodes come to join: they are sent on from there, unless the port is 0. `successors` run the work
    if this node coordinates it again. `settings` are other fields of `WorkerSettings`.
    """
    log.warning(
        "cluster %s runs, coordinated at %s: joins it", cluster.authority.cluster, format_address(cluster.address)
    )
    if listen[1]:
        CoordinatorRedirect(
            listen, cluster.authority, functools.partial(cluster.known.coordinator, FIND_SECONDS / 10)
        ).start()
    host, port = cluster.address
    token = str(JoinToken.of_authority(cluster.authority))
    worker = WorkerSettings(host=host, port=port, token=token, **settings)

    def make_replica(identity: Identity, host: str) -> JoinedReplica:
        cache = worker.weights_cache, worker.weights_cache_bytes
        return JoinedReplica(identity, host, successors, cache, cluster.known.keep)

    return departure.run(lambda: work(worker, departure.front_end, make_replica))
