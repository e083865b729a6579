"""A node's process takes the coordinator's place: it opens the cluster anew from the state that was replicated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import format_address
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.replicated_state import ReplicatedState
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.workload import Workload
from tllm.node.replication.coordinator_replication import CoordinatorReplication
from tllm.node.serve.node_requests import NODES
from tllm.node.serve.serving import Serving
from tllm.server.admission.account import Account, ApiKey
from tllm.server.http.auth import keys_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.stored.stream_store import LocalStreamStore
from tllm.text.tokenizer import Tokenizer

log = logging.getLogger("tllm.node")

OnBegin = Callable[[Coordinator], None]
"""on_begin(coordinator): called with the coordinator that this process runs from now on"""

OnTakeover = Callable[[Serving, ReplicatedState], Awaitable[None]]
"""on_takeover(serving, state): called with a cluster that was taken over, once its ranks are ready"""


async def answer_nodes(serving: Serving, state: ReplicatedState) -> None:
    """Run the requests of nodes' HTTP servers, and what is left of the replies that may be taken up.

    There is no server in this coordinator's own name. LoRA adapters are loaded again from their folders, where this
    machine has them too.
    """
    work = serving.coordinator.work
    model, folder = work.served, work.folder
    if model is None or folder is None:
        return
    settings = ServerSettings(
        max_sequences=model.max_sequences,
        request_seconds=model.request_seconds,
        keep_streams=model.keep_streams,
        keep_streams_bytes=model.keep_streams_bytes,
    )
    if work.adapters is not None:
        await serving.adapters.load_again(work.adapters)
    router = RequestRouter(serving, Metrics(model.model_name), settings, keys_of(settings))
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
    store = LocalStreamStore(router, tokenizer, settings)
    account = Account(ApiKey(NODES, b""), time.monotonic)
    for reply in state.replies.values():
        store.restore(reply, account)
    serving.open_to_nodes(model, router, store, None if work.adapters is None else serving.adapters)


async def take_over(
    replica: Replica, work: Workload, host: str, on_begin: OnBegin, on_takeover: OnTakeover = answer_nodes
) -> None:
    """Coordinate the cluster whose replica leads, until that leads no more: then Deposed is raised.

    `host` is where nodes reach this machine. Nodes that were in the last plan keep their ranks and the weights that
    they have in memory.
    """
    began, state = time.monotonic(), replica.state
    assert state.authority is not None and state.work is not None, "a coordinator says both before it has nodes"
    authority = Authority.restore(state.authority.certificate, state.authority.key)
    serving = Serving(work, authority, (host, 0), (), state.work.policy)
    coordinator = serving.coordinator
    coordinator.resume(state.epoch, state.tokens)
    coordinator.replication = CoordinatorReplication(
        replica, coordinator, authority, host, state.work.policy, state.work.replicas
    )
    on_begin(coordinator)
    where = format_address((host, coordinator.control_server.port))
    log.warning("takes over as coordinator of cluster %s at %s, in term %d", state.cluster, where, replica.term)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(coordinator.run())
            tasks.create_task(_open(serving, state, began, on_takeover))
    except ExceptionGroup as group:
        raise next((error for error in group.exceptions if isinstance(error, Deposed)), group) from None
    finally:
        coordinator.members.abandon()
        coordinator.control_server.close()


async def _open(serving: Serving, state: ReplicatedState, began: float, on_takeover: OnTakeover) -> None:
    """Wait for the nodes that are left, and let the next epoch begin."""
    expected = set(state.ranks) - set(state.own)

    def have_come() -> bool:
        return expected <= {member.node for member in serving.state.living}

    # A node may notice only by silence that the coordinator before is gone.
    await serving.recovery.until(have_come, serving.coordinator.work.lost_after)
    serving.recovery.take_up()
    await serving.recovery.until(lambda: serving.is_open)
    seconds = time.monotonic() - began
    log.warning("has taken over: epoch %d is ready, %.1f s after it was elected", serving.state.epoch, seconds)
    await on_takeover(serving, state)
