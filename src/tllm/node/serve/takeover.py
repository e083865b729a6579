"""Lets a node's process take the place of a coordinator that serves, and answer the requests of nodes' HTTP servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tllm.cluster.consensus.replicated_state import ReplicatedState
from tllm.node.replication.replica_host import check_readable
from tllm.node.replication.succession import Office
from tllm.node.serve.node_requests import NODES
from tllm.node.serve.serving import Serving
from tllm.server.admission.account import Account, ApiKey
from tllm.server.http.auth import keys_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.stored.stream_store import LocalStreamStore
from tllm.text.tokenizer import Tokenizer

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
        await serving.adapters.load_again()
    router = RequestRouter(serving, Metrics(model.model_name), settings, keys_of(settings))
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
    store = LocalStreamStore(router, tokenizer, settings)
    account = Account(ApiKey(NODES, b""), time.monotonic)
    for reply in state.replies.values():
        store.restore(reply, account)
    serving.open_to_nodes(router, store, None if work.adapters is None else serving.adapters)


async def take_over_serving(office: Office, on_takeover: OnTakeover = answer_nodes) -> None:
    """Serve as the successor of the coordinator before, until another follows: then Deposed is raised.

    ConfigError where this machine lacks the layers that embeddings go through.
    """
    state, served = office.state, office.workload()
    check_readable(served.reads)
    serving = Serving(served, office.authority, (office.host, 0), (), office.policy)

    async def work(opened: asyncio.Event) -> bool:
        await opened.wait()
        await on_takeover(serving, state)
        return False

    await office.coordinate(serving, work)
