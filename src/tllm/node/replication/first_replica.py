"""The first coordinator's replica: from it nodes that join learn the state, so that one of them can take its place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.consensus.replica import Replica
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.join_token import JoinToken
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
    tasks = [asyncio.create_task(replica.run(), name="replica")]
    if options.authority is not None:
        options.authority.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = KnownReplicas(options.authority, authority)
        tasks.append(asyncio.create_task(known.follow(replica), name="known replicas"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        replica.close()
