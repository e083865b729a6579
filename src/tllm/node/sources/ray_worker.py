"""`RayWorker`: what a Ray actor does, which is to run one worker as its child.

Ray pickles what goes to an actor and comes back, so only texts and numbers do. The token is in the settings, which are
an argument of a call: the environment that Ray gives an actor can be read in its dashboard, and arguments cannot.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import deque
from typing import Any

from tllm.node.sources.worker_forks import TAIL_LINES, how_it_ended, worker_command


class RayWorker:
    """One worker on the node where Ray has placed this actor; if Ray ends the actor, the worker ends too, as its stdin
    closes."""

    def place(self) -> dict[str, str]:
        """Where the actor is: Ray's id of the node, and its address."""
        ray: Any = importlib.import_module("ray")
        return {"ray_node": ray.get_runtime_context().get_node_id(), "address": ray.util.get_node_ip_address()}

    def run(self, settings: str, threads: int, folder: str) -> tuple[str, str]:
        """Run a worker with these settings (`WorkerSettings` as JSON) until it ends: how it did, and its last lines.

        It works in `folder`, where the job's relative paths begin, if this node has it.
        """
        command, environment = worker_command(threads)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=folder if os.path.isdir(folder) else None,
            text=True,
            errors="replace",
        )
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(f"{settings}\n")
        process.stdin.flush()
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        for line in process.stderr:
            tail.append(line.rstrip())
            print(tail[-1], file=sys.stderr, flush=True)  # into Ray's log of this actor
        return how_it_ended(process.wait()), "\n".join(tail)
