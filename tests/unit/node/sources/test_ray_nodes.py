"""What is asked of Ray and what becomes of its answers, by a Ray that is played here; the real one is in tests/e2e."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tllm.core.errors import ClusterError, ConfigError, TllmError
from tllm.node.sources import ray_nodes as module
from tllm.node.sources.ray_cluster import RayCluster, RayRequest, selects
from tllm.node.sources.ray_nodes import RayNodes
from tllm.node.worker import WorkerSettings

PLAIN = WorkerSettings(host="", port=0, token="")


class Lost(Exception):
    """What the played Ray calls an actor that died."""


class PlayedRay:
    """Nodes as they are given, and actors whose answers the test gives; `asked` is what was asked for, in order."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self._nodes = [dict(Alive=True, Resources=node, Labels=node.pop("labels", {})) for node in nodes]
        self.exceptions = SimpleNamespace(RayError=Lost, RaySystemError=MemoryError)
        self.util = SimpleNamespace(
            placement_group=lambda bundles, **how: self.asked.append(("group", bundles, how)),
            remove_placement_group=lambda group: self.asked.append(("removed",)),
        )

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda: self._actor(how)))

    def kill(self, actor: Any) -> None:
        self.asked.append(("killed", actor.name))

    def wait(self, calls: list[str], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[str], list[str]]:
        done = [call for call in calls if call in self.answers]
        if not done:
            time.sleep(0.01)
        return done, []

    def get(self, call: str) -> Any:
        answer = self.answers[call]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def until(self, *words: Any) -> tuple[Any, ...]:
        """Wait until something that begins with these words was asked for."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for asked in self.asked:
                if asked[: len(words)] == words:
                    return asked
            time.sleep(0.01)
        raise AssertionError(f"{words} is not in {self.asked}")

    def _actor(self, how: dict[str, Any]) -> Any:
        name = f"a{sum(asked[0] == 'actor' for asked in self.asked)}"
        self.asked.append(("actor", name, how))

        def call(method: str, *words: Any) -> str:
            self.asked.append((f"{name}.{method}", *words))
            return f"{name}.{method}"

        methods = {
            method: SimpleNamespace(remote=lambda *words, method=method: call(method, *words))
            for method in ("place", "run")
        }
        return SimpleNamespace(name=name, **methods)


def play(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> tuple[PlayedRay, RayCluster]:
    ray = PlayedRay(*nodes)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    return ray, RayCluster()


@pytest.mark.parametrize(
    ("selector", "value", "holds"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", None, True),
        ("!a", "a", False),
        ("in(a, b)", "b", True),
        ("in(a, b)", "c", False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", "a", False),
    ],
)
def test_a_label_is_selected_as_ray_selects_it(selector: str, value: str | None, holds: bool) -> None:
    assert selects(selector, value) == holds


def test_each_actor_takes_all_processors_of_the_smallest_node_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cluster = play(monkeypatch, dict(CPU=8.0), dict(CPU=4.0, box=1.0), dict(CPU=2.0), dict(memory=1e9))
    assert cluster.bundle(RayRequest(), 1) == {"CPU": 8}
    assert cluster.bundle(RayRequest(), 2) == {"CPU": 4}
    assert cluster.bundle(RayRequest(), 9) == {"CPU": 2}, "nodes that are to come are like the smallest"
    assert cluster.bundle(RayRequest({"box": 1}), 2) == {"CPU": 4, "box": 1}
    assert cluster.bundle(RayRequest({"CPU": 3, "box": 1}), 2) == {"CPU": 3, "box": 1}
    assert cluster.bundle(RayRequest({"box": 1}, spread="SPREAD"), 2) == {"CPU": 2, "box": 1}, "two on one node"
    assert len(cluster.suitable(RayRequest())) == 3, "a head without processors takes none"


def test_a_worker_goes_to_each_actor_once_it_is_placed_and_again_after_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.05)
    ray, cluster = play(monkeypatch, dict(CPU=4.0), dict(CPU=4.0))
    failures: list[TllmError] = []
    source = RayNodes(cluster, RayRequest({"GPU": 1, "box": 2}), PLAIN, token="tllm1-good")
    source.watch(failures.append)
    source.start(2, "10.0.0.1:7", "tllm1-other")
    how = dict(strategy="STRICT_SPREAD", bundle_label_selector=None)
    assert ray.asked[0] == ("group", [{"CPU": 1, "GPU": 1, "box": 2}] * 2, how)
    _, _, how = ray.until("actor", "a0")
    assert (how["num_cpus"], how["num_gpus"], how["resources"], how["max_restarts"]) == (1, 1, {"box": 2}, 0)
    ray.answers["a0.place"] = {"ray_node": "f00", "address": "10.0.0.2"}
    _, text, threads, _ = ray.until("a0.run")
    told = msgspec.json.decode(text, type=WorkerSettings)
    assert (told.host, told.port, told.token, told.node, told.threads) == ("10.0.0.1", 7, "tllm1-good", "ray-0", 1)
    assert threads == 1
    assert source.nodes()["ray-0"] == {"engine": "ray", "ray_node": "f00", "address": "10.0.0.2"}
    ray.answers["a0.run"] = ("ended with exit code 5", "INFO\nAuthError: it runs another program")
    ray.until("killed", "a0")
    ray.until("a2.place")
    ray.answers["a1.place"] = Lost("a traceback\n  The actor died because its node has died.\n")
    ray.until("a3.place")
    source.start(1, "10.0.0.1:7", "tllm1-other")
    assert ray.until("group") and sum(asked[0] == "group" for asked in ray.asked) == 1, "the same places again"
    source.stop()
    ray.until("removed")
    said, also = failures
    assert (said.message, said.hint) == (
        "the actor of ray-0 on 10.0.0.2 ended with exit code 5",
        "its last words: AuthError: it runs another program",
    )
    assert also.message == "the actor of ray-1, not placed yet, ended"
    assert also.hint == "its last words: The actor died because its node has died."
    assert not [thread for thread in threading.enumerate() if thread.name == "ray nodes"]


def test_too_few_places_are_said_once_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cluster = play(monkeypatch, dict(CPU=4.0), dict(CPU=1.0))
    failures: list[TllmError] = []
    source = RayNodes(cluster, RayRequest({"CPU": 2.0}, seconds=0.05), PLAIN)
    source.watch(failures.append)
    source.start(3, "10.0.0.1:7", "tllm1-x")
    until = time.monotonic() + 30
    while not failures and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)  # in which nothing is said again
    source.stop()
    (said,) = failures
    assert isinstance(said, ClusterError)
    assert said.message == (
        "Ray had no place for 3 nodes with 2 CPU each within 0.05 s: of its 2 nodes 1 have that, less what others have "
        "taken"
    )
    assert said.hint.endswith("--ray-strategy SPREAD puts several on one")


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="--on ray needs the package ray") as caught:
        RayCluster()
    assert 'pip install "together-llm[ray]"' in caught.value.hint


def test_another_version_of_ray_or_python_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **more: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1")

    ray = PlayedRay()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", SimpleNamespace())
    with pytest.raises(ClusterError, match=r"runs other versions than this machine: .*Ray: 2.50.0 Python: 3.12.1"):
        RayCluster("auto")
    with pytest.raises(ConfigError, match="the address local would start a Ray of its own"):
        RayCluster("local")
