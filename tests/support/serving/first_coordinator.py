"""A coordinator in a process of its own, for tests that kill it: `first_coordinator.py MODEL PLAN LOCAL REPLICAS`.

It prints a line of JSON for each thing: the join line's address and token, that it is ready, its replicas whenever they
change, that it was deposed, and where its successor is. It ends the cluster when its stdin closes; after a line its
system refuses it what it needs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

from tllm.cluster.consensus.replica import Deposed
from tllm.core.stacks import show_stacks_on_signal
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.sources.node_source import JoinLine

SIZES = EngineConfig(cache_tokens=2048, max_model_len=256)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(folder: Path, plan: str, local: int, replicas: int) -> None:
    def invite(count: int, address: str, token: str) -> None:
        say(address=address, token=token)

    options = ClusterOptions(local=local, threads=1, source=JoinLine(invite), replicas=replicas)
    async with open_cluster(folder, plan, SIZES, options) as serving:
        say(ready=True, epoch=serving.state.epoch)
        ended = threading.Event()

        def refuse(_: float) -> None:
            raise OSError(24, "Too many open files")

        def follow_stdin() -> None:
            for _ in sys.stdin:
                serving.coordinator.members._look = refuse  # type: ignore[assignment,method-assign]
            ended.set()

        threading.Thread(target=follow_stdin, daemon=True).start()
        before: object = None
        while not ended.is_set():
            if before != (now := serving.status()["replicas"]):
                before = now
                say(replicas=now)
            if serving.fault is not None:
                say(fault=serving.fault.message)
                if isinstance(serving.fault, Deposed):
                    await serving.coordinator.find_successor(serving.fault, 30.0)
                    say(successor=serving.fault.successor)
                return
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    show_stacks_on_signal()
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
