"""The first coordinator's replica. Nodes that join get the state from it, so that one of them can take its place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.join_token import JoinToken
from tllm.core.tasks import background, end_tasks
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.machine.process_facts import reachable
from tllm.node.replication.coordinated_elsewhere import RunningCluster, Succeeded
from tllm.node.replication.coordinator_replication import CoordinatorReplication
from tllm.node.replication.known_replicas import KnownReplicas
from tllm.node.replication.succession import SuccessorJob


@contextlib.asynccontextmanager
async def replicated(job: SuccessorJob, authority: Authority, options: ClusterOptions) -> AsyncIterator[None]:
    """While the block runs, let nodes that join keep what the coordinator knows, if `options.replicas` says so.

    Where the block ends as this process was deposed, and its successor was found, that is Succeeded: at whatever moment
    it was deposed, for who has not looked for the successor in the block does so here, as long as the options say. Also
    while nodes are waited for, once the cluster that this machine began before is found to run.
    """
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
    if options.authority is not None:
        options.authority.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = KnownReplicas(options.authority, authority)
    tasks = [
        background(replica.run(), "the replica of the coordinator's state"),
        background(known.follow(replica), "the list of replicas"),
    ]
    try:
        async with given_up_for_before(known, lambda: coordinator.state.plan is None, coordinator.let_go):
            yield
    except Deposed as deposed:
        if deposed.successor is None and not deposed.was_sought and options.successor_seconds:
            await coordinator.find_successor(deposed, options.successor_seconds)
        if deposed.successor is None:
            raise
        door = options.address[0], coordinator.control_server.port
        raise Succeeded(deposed, RunningCluster(deposed.successor, authority, known), door) from deposed
    finally:
        await end_tasks(*tasks)
        replica.close()


@contextlib.asynccontextmanager
async def given_up_for_before(
    known: KnownReplicas, is_forming: Callable[[], bool], let_go: Callable[[], None]
) -> AsyncIterator[None]:
    """Deposed, by the name of its successor, where a cluster is still forming when the one before is found to run: none
    of those that kept its state could be reached when this command began. Nodes that came are `let_go` and not told to
    end, as they are nodes of the one before."""
    deposed = Deposed("the cluster that this machine began before runs, and is reached now")

    async def look(block: asyncio.Timeout) -> None:
        deposed.successor = await known.until_led(is_forming)
        if deposed.successor is not None:
            let_go()
            block.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as block:
            looking = background(look(block), "the search for the cluster before")
            try:
                yield
            finally:
                await end_tasks(looking)
    except TimeoutError as error:
        if not block.expired():
            raise
        raise deposed from error
