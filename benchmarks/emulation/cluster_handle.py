"""The benchmark's side of a cluster on emulated machines: it sends orders to `cluster_process.py` and reads answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchmarks.emulation.emulated_machines import EmulatedMachines
from tllm.planner.measured.survey import Goal, Survey
from tllm.spec.plan import Plan

LOG_CHARACTERS = 2000
"""How much of the end of a log goes into an error."""
CLUSTER_PROCESS = ("-m", "benchmarks.emulation.cluster_process")


class ClusterHandle:
    """Used in a `with`, in which every machine has joined. RuntimeError with the log's end where the cluster ends."""

    def __init__(self, machines: EmulatedMachines, folder: Path, goal: Goal, path: Path) -> None:
        self._machines, self._folder, self._log = machines, folder, folder / "cluster.log"
        count = len(machines.shape.speeds)
        self._order = {"goal": goal, "path": str(path), "nodes": count, "host": machines.hosts.addresses[0]}

    def __enter__(self) -> ClusterHandle:
        self._process = self._machines.start(0, self._log, *CLUSTER_PROCESS, asked=True)
        address, token = self._answer({"type": "Form", **self._order})
        words = ("-m", "tllm.cli", "join", address, "--token", token, "--threads", "1")
        for machine in range(1, len(self._machines.shape.speeds)):
            log = self._folder / f"node-{machine}.log"
            self._machines.start(machine, log, *words, "--name", f"machine-{machine}")
        self._read()
        self._machines.throttle()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._machines.end()

    def measure(self, settings: Any) -> Survey:
        return msgspec.convert(self._answer({"type": "Measure", "settings": msgspec.to_builtins(settings)}), Survey)

    def train(self, plan: Plan, places: tuple[int, ...], keys: Mapping[str, object]) -> None:
        """Run the job under a plan on these machines, with some of its keys set; return when it has ended."""
        sets = [f"{key}={value}" for key, value in keys.items()]
        self._answer({"type": "Train", "sets": sets, "plan": str(plan), "places": places})

    def serve(
        self, plan: Plan, places: tuple[int, ...], prompt: int, reply: int, asked: int, drafted: int = 0, **more: Any
    ) -> list[float]:
        """Answer `asked` prompts, one after another; return for each the seconds from its first token to its last.

        `more` are other fields of `cluster_process.Serve`.
        """
        sizes = {"prompt": prompt, "reply": reply, "asked": asked, "drafted": drafted, **more}
        found: list[float] = self._answer({"type": "Serve", "plan": str(plan), "places": places, **sizes})
        return found

    def numbers(self) -> dict[str, float]:
        """The engine's counters over the replies of the last `serve`."""
        found: dict[str, float] = self._answer({"type": "Numbers"})
        return found

    def _answer(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text(errors="replace")[-LOG_CHARACTERS:])
        return msgspec.json.decode(line)
