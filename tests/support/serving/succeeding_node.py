"""A node that joins as `tllm join` does, in a process of its own. When it takes the coordinator's place it continues
the prompts that its command line gives, and prints what came as a line of JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from functools import partial

import msgspec

from tllm.cluster.certificates import Identity
from tllm.cluster.consensus.replicated_state import ReplicatedState
from tllm.cluster.settings import EngineSettings
from tllm.core.stacks import show_stacks_on_signal
from tllm.node.replication.replica_host import JoinedReplica
from tllm.node.serve.serving import Serving
from tllm.node.serve.takeover import take_over_serving
from tllm.node.worker import WorkerSettings, work
from tllm.spec.request import Request


async def ask(serving: Serving, state: ReplicatedState) -> None:
    """Continue each prompt in the cluster that was taken over."""
    requests = msgspec.json.decode(sys.argv[1], type=list[Request])

    async def tokens(request: Request) -> list[int]:
        return [token async for output in serving.submit(request) for token in output.token_ids]

    ids = await asyncio.gather(*map(tokens, requests))
    state = serving.state
    said = dict(
        epoch=state.epoch, plan=str(state.plan), ids=ids, read=[m.loaded.bytes_read for m in state.ranks if m.loaded]
    )
    print(json.dumps(said), flush=True)


def make_replica(identity: Identity, host: str) -> JoinedReplica:
    return JoinedReplica(identity, host, {EngineSettings: partial(take_over_serving, on_takeover=ask)})


if __name__ == "__main__":
    show_stacks_on_signal()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    work(msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings), make_replica=make_replica)
