"""The first coordinator's replica: from it nodes that join learn the state, so that one of them can take its place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.consensus.replica import Replica
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.join_token import JoinToken
from tllm.core.tasks import background, end_tasks
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.machine.process_facts import reachable
from tllm.node.replication.coordinator_replication import CoordinatorReplication
from tllm.node.replication.known_replicas import KnownReplicas
from tllm.node.replication.succession import SuccessorJob


@contextlib.asynccontextmanager
async def replicated(job: SuccessorJob, authority: Authority, options: ClusterOptions) -> AsyncIterator[None]:
    """While the block runs, let nodes that join keep what the coordinator knows, if `options.replicas` says so."""
    if options.replicas == 1:
        yield
        return
    coordinator, host = job.coordinator, reachable(options.address[0])
    timing = RaftTiming(election=options.lost_after / 2)
    replica = Replica(authority.identity(COORDINATOR), host, (options.address[0], 0), founds=True, timing=timing)
    coordinator.replication = CoordinatorReplication(
        replica, coordinator, authority, host, job.recovery.policy, options.replicas
    )
    coordinator.tokens.keep(JoinToken.of_authority(authority), time.time())
    tasks = [background(replica.run(), "the replica of the coordinator's state")]
    if options.authority is not None:
        options.authority.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = KnownReplicas(options.authority, authority)
        tasks.append(background(known.follow(replica), "the list of replicas"))
    try:
        yield
    finally:
        await end_tasks(*tasks)
        replica.close()
