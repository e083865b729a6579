"""`ThreadNodes`: the nodes of a cluster as threads of the test's own process, whose workers it can reach into."""

from __future__ import annotations

import threading

import pytest

from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.roles import control as control_module
from tllm.node.sources.node_source import JoinLine
from tllm.node.worker import MakeReplica, Worker, WorkerSettings

END_SECONDS = 60.0


class ThreadNodes:
    """`workers` by their names, each of a letter, once they have joined; they end with their cluster."""

    def __init__(self, names: str, monkeypatch: pytest.MonkeyPatch, make_replica: MakeReplica | None = None) -> None:
        monkeypatch.setattr(control_module, "END_SECONDS", END_SECONDS)  # after which a worker ends its process
        self.workers: dict[str, Worker] = {}
        self._names, self._make_replica = names, make_replica
        self._threads: list[threading.Thread] = []

    @property
    def options(self) -> ClusterOptions:
        """Of a cluster that these nodes join."""
        return ClusterOptions(local=0, source=JoinLine(self._start), join_seconds=60)

    def end(self) -> None:
        """All have ended by now."""
        for thread in self._threads:
            thread.join(END_SECONDS)
            assert not thread.is_alive()

    def _start(self, count: int, address: str, token: str) -> None:
        if not self._threads:
            for name in self._names:
                thread = threading.Thread(target=self._work, args=(address, token, name), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work(self, address: str, token: str, name: str) -> None:
        host, _, port = address.rpartition(":")
        settings = WorkerSettings(host=host, port=int(port), token=token, node=name, threads=1)
        self.workers[name] = Worker(settings, make_replica=self._make_replica)
        self.workers[name].run()
