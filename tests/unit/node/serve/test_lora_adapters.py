"""Adapters that a cluster is to begin with are known to whoever takes the coordinator's place, however early."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.models.adapters import save_adapter
from tests.support.models.families import save_model
from tests.unit.node.front_end.test_remote_engine import MODEL
from tllm.cluster.certificates import Authority
from tllm.cluster.messages import LoadAdapter
from tllm.cluster.weight_messages import AdapterFiles
from tllm.core.errors import CapacityError, ClusterError, ConfigError, RequestError
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions
from tllm.node.replication.replicated_work import replicated_work, workload_of
from tllm.node.serve.lora_adapters import CHANGE_SECONDS, LOAD_SECONDS, TRIES, LoraAdapters
from tllm.node.serve.open_cluster import serving_workload
from tllm.node.serve.serving import Serving
from tllm.spec.lora.lora_config import ServedLoras
from tllm.spec.request import Output

LOAD_ON_EACH_RANK = LoraAdapters._load_on_each_rank


@pytest.fixture
def known(tmp_path: Path) -> ServedLoras:
    """Two adapters of the model in a folder beside them."""
    save_model("llama", tmp_path / "model")
    return ServedLoras(2, 8, {name: str(save_adapter(tmp_path / "model", tmp_path / name)) for name in "ab"})


@pytest.fixture
def cluster(known: ServedLoras, tmp_path: Path) -> Iterator[Serving]:
    """It was opened, and has no nodes yet."""
    options = ClusterOptions(served=MODEL, adapters=known)
    work = serving_workload(tmp_path / "model", "pp=2", EngineConfig(cache_tokens=256), options)
    cluster = Serving(work, Authority.create(), LOOPBACK)
    yield cluster
    cluster.coordinator.control_server.close()


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The adapters that ranks were to load, which they have."""
    lora = list[str]()

    async def load(self: LoraAdapters, files: AdapterFiles) -> None:
        lora.append(files.lora)

    monkeypatch.setattr(LoraAdapters, "_load_on_each_rank", load)
    return lora


def successor(cluster: Serving) -> Serving:
    """What a node opens with the work that it knows of."""
    return Serving(
        workload_of(replicated_work(cluster.coordinator.work, "replan", 3), "", 0), Authority.create(), LOOPBACK
    )


def test_they_are_known_before_they_are_loaded(cluster: Serving, known: ServedLoras, loaded: list[str]) -> None:
    assert cluster.coordinator.work.adapters == known and not cluster.adapters.paths
    chosen = dataclasses.replace(cluster.coordinator.work, served=None, adapters=None)
    assert cluster.adopt(chosen).adapters == known, "whatever plan is chosen"
    other = successor(cluster)
    asyncio.run(other.adapters.load_again())
    other.coordinator.control_server.close()
    assert other.adapters.paths == known.paths and len(loaded) == 2
    assert (other.adapters.max_loras, other.adapters.max_lora_rank) == (2, 8)


def test_they_are_known_while_others_are_loaded(cluster: Serving, known: ServedLoras, loaded: list[str]) -> None:
    asyncio.run(cluster.adapters.load("a", known.paths["a"]))
    assert cluster.coordinator.work.adapters == known, "b is not loaded yet"
    asyncio.run(cluster.adapters.load_first())
    assert cluster.coordinator.work.adapters == known and cluster.adapters.paths == known.paths
    asyncio.run(cluster.adapters.unload("a"))
    assert cluster.coordinator.work.adapters == ServedLoras(2, 8, {"b": known.paths["b"]})


def test_what_the_next_machine_lacks_is_left_out(cluster: Serving, known: ServedLoras, tmp_path: Path) -> None:
    (tmp_path / "a" / "adapter_config.json").unlink()
    other = successor(cluster)
    asyncio.run(other.adapters.load_again())
    other.coordinator.control_server.close()
    assert list(other.adapters.paths) == ["b"]
    assert other.coordinator.work.adapters == ServedLoras(2, 8, {"b": known.paths["b"]})


@pytest.mark.parametrize("path", ["~nobody-of-this-name/a", "a\0b", "CIRCLE"])
def test_a_path_that_can_be_none_is_refused_as_such(cluster: Serving, tmp_path: Path, path: str) -> None:
    """Over HTTP each was a fault of the server, with a traceback in its log."""
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(ConfigError, match="is no path here"):
        asyncio.run(cluster.adapters.load("c", path.replace("CIRCLE", str(circle))))
    assert not cluster.adapters.paths


def test_an_adapter_that_requests_still_have_is_said_to_be_why_there_is_no_room(
    cluster: Serving, known: ServedLoras
) -> None:
    """Who was told to unload one, or that the name is taken, had unloaded it before."""

    async def scene() -> None:
        for name in "ab":
            await cluster.adapters.load(name, known.paths[name])
        with pytest.raises(CapacityError, match=r"max_loras is 2\nhint: unload one"):
            await cluster.adapters.load("c", known.paths["a"])
        request = cluster.adapters.counted(cluster.adapters.id_of("a"), _endless())
        await anext(request)
        await cluster.adapters.unload("a")
        with pytest.raises(RequestError, match="'a' was unloaded, and 1 requests have it still"):
            await cluster.adapters.load("a", known.paths["a"])
        with pytest.raises(CapacityError, match="requests still have 1 of them that were unloaded"):
            await cluster.adapters.load("c", known.paths["a"])
        await request.aclose()
        await cluster.adapters.load("a", known.paths["a"])

    asyncio.run(scene())


def test_the_last_try_to_load_one_waits_for_no_other(cluster: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds, after which nothing was tried again."""
    waits, coordinator = list[float](), SimpleNamespace(state=SimpleNamespace(epoch=0))

    async def until(is_so: Callable[[], bool], seconds: float) -> None:
        waits.append(seconds)

    async def fail(self: LoraAdapters, message: LoadAdapter) -> None:
        coordinator.state.epoch += 1
        raise ClusterError("a node is lost")

    adapters = cluster.adapters
    monkeypatch.setattr(LoraAdapters, "_ask_each", fail)
    monkeypatch.setattr(adapters, "_coordinator", coordinator)
    monkeypatch.setattr(adapters, "_recovery", SimpleNamespace(is_open=True, until=until))
    monkeypatch.setattr(adapters, "_check_room", lambda: None)
    with pytest.raises(ClusterError, match="a node is lost"):
        asyncio.run(LOAD_ON_EACH_RANK(adapters, AdapterFiles("a", 1, {})))
    assert waits == [LOAD_SECONDS, CHANGE_SECONDS] * (TRIES - 1) + [LOAD_SECONDS]


async def _endless() -> AsyncGenerator[Output, None]:
    while True:
        yield Output(request_id="one")
