"""A whole Ray on this machine: a head without processors, and nodes that each act as a machine, in a process apart.

Run as a program it keeps the cluster for a test, which tells it by lines what to do; Ray's own folder is a short one,
because the paths of its sockets may not be longer than 107 bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20


class Ray:
    """Its address, and nodes by number that come and go."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self.folder = process, folder
        self.address = self._answer()
        self.ids: list[str] = []
        self._dead: set[int] = set()
        self.environment = {"RAY_ADDRESS": self.address, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}

    def add(self, **node: Any) -> int:
        """A node more (num_cpus, resources, labels); its number, and in `ids` what Ray calls it."""
        self.ids.append(self._ask(["add", node]))
        return len(self.ids) - 1

    def kill(self, number: int) -> None:
        """The node's processes die, as with its machine."""
        self._ask(["kill", number])
        self._dead.add(number)

    def is_alive(self, number: int) -> bool:
        return number not in self._dead

    def free(self) -> dict[str, float]:
        """What nobody holds."""
        return dict(json.loads(self._ask(["free"])))

    def _ask(self, words: list[Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("= "):
                return line.removeprefix("= ").strip()
        raise AssertionError(f"Ray ended: {(self.folder / 'said').read_text()[-3000:]}")


@contextlib.contextmanager
def ray_cluster(*nodes: dict[str, Any]) -> Iterator[Ray]:
    """Such a cluster with these nodes; ended, with all that runs on it, with the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    (folder / "ray").mkdir()
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
    }
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        said = stack.enter_context((folder / "said").open("w"))
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.cluster.ray_cluster"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
            )
        )
        assert process.stdin is not None
        stack.callback(process.wait)
        stack.callback(process.stdin.close)
        one = Ray(process, folder)
        for node in nodes:
            one.add(**node)
        yield one


def main() -> None:
    """Keep a cluster until stdin ends."""
    from ray.cluster_utils import Cluster

    def answer(text: str) -> None:
        print(f"= {text}", flush=True)

    sizes = dict(object_store_memory=STORE_BYTES)
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False, **sizes))
    try:
        answer(cluster.address)
        nodes: list[Any] = []
        for line in sys.stdin:
            match json.loads(line):
                case ["add", node]:
                    nodes.append(cluster.add_node(**{**sizes, **node}))
                    answer(nodes[-1].node_id)
                case ["kill", number]:
                    cluster.remove_node(nodes[number], allow_graceful=False)
                    answer("")
                case ["free"]:
                    answer(json.dumps(cluster.global_state.available_resources()))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
