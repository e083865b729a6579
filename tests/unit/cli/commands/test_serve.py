from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models.adapters import save_adapter
from tests.support.serving.scripted_engine import ListedEngine
from tllm.api.engine_options import EngineOptions, engine_options
from tllm.api.open_engine import cluster_options
from tllm.cli.commands import serve
from tllm.cli.main import main
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.http_messages import ServedModel
from tllm.core.errors import ConfigError
from tllm.node.coordinator.cluster_options import ClusterOptions


class _ListedCluster(ListedEngine):
    """As a cluster that serves: nobody in it could take over, no plan of it is watched, it never ends by itself."""

    can_hand_over, is_open, state, fault = False, False, None, None

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        self.served, self.ended = served, asyncio.Event()

    def open_to_nodes(self, *answering: object) -> None:
        """No node answers."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` opens its cluster with, and then the settings that it serves with."""
    seen: list[Any] = []

    @asynccontextmanager
    async def open_listed(
        options: EngineOptions, cluster: ClusterOptions, *, policy: str, choice: Any
    ) -> AsyncIterator[_ListedCluster]:
        source, authority = cluster.source, cluster.authority
        assert source is not None and cluster.local is not None
        joining = options.plan.world_size - cluster.local
        assert cluster.served is not None and cluster.served.model_name == options.folder.name
        seen.extend(((str(options.plan), joining, cluster.address), cluster.replicas))
        assert options.memory == (12 << 30 if "--memory" in sys.argv else None)
        assert (choice is None) == (options.plan.world_size == 1 or "--plan" in sys.argv), "a plan that is given stays"
        if joining:
            source.start(joining, "10.0.0.1:7000", "tllm1-abc")
        if policy == "wait":
            assert authority == Path("kept")
            source.start(1, "10.0.0.1:7000", "tllm1-def")
        yield _ListedCluster(cluster.served)

    async def serve(app: Any, on_ready: Any, stop: Any, leaves: Any, lingers: Any) -> None:
        assert not leaves() and not lingers(), "nobody could take over"
        seen.append(app.settings)
        on_ready("http://127.0.0.1:1")

    monkeypatch.setattr("tllm.cli.commands.serve.open_nodes", open_listed)
    monkeypatch.setattr("sys.argv", ["tllm"])
    monkeypatch.setattr("tllm.cli.commands.serve.serve_http", serve)
    monkeypatch.delenv("TLLM_API_KEY", raising=False)
    return seen


@pytest.mark.parametrize(
    ("options", "plan", "joining", "host"),
    [
        ([], "pp=1,tp=1,layers=6", 0, "127.0.0.1"),
        (["--plan", "pp=2,tp=1+2"], "pp=2,tp=1+2,layers=3+3", 0, "127.0.0.1"),
        (["--local", "3"], "pp=3,tp=1+1+1,layers=2+2+2", 0, "127.0.0.1"),
        (["--nodes", "3"], "pp=3,tp=1+1+1,layers=2+2+2", 2, "0.0.0.0"),
        (["--nodes", "2", "--plan", "pp=2,tp=2+1"], "pp=2,tp=2+1,layers=3+3", 1, "0.0.0.0"),
        (["--nodes", "2", "--cluster-host", "10.0.0.1"], "pp=2,tp=1+1,layers=3+3", 1, "10.0.0.1"),
    ],
)
def test_who_takes_part(
    options: list[str], plan: str, joining: int, host: str, folder: Path, opened: list[Any]
) -> None:
    sys.argv += options
    assert main(["serve", str(folder), "--port", "0", *options]) == 0
    assert opened[0] == (plan, joining, (host, 0))


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ([], 1),
        (["--nodes", "2"], 1),
        (["--nodes", "3"], 3),
        (["--nodes", "6"], 3),
        (["--nodes", "3", "--cluster-folder", "kept"], 3),
        (["--nodes", "3", "--cluster-folder", "kept", "--replicas-of-coordinator", "1"], 1),
        (["--nodes", "5", "--replicas-of-coordinator", "5"], 5),
        (["--nodes", "5", "--replicas-of-coordinator", "1"], 1),
    ],
)
def test_who_knows_the_clusters_state(options: list[str], replicas: int, folder: Path, opened: list[Any]) -> None:
    sys.argv += options
    assert main(["serve", str(folder), "--port", "0", *options]) == 0
    assert opened[1] == replicas


def test_the_line_for_the_others(folder: Path, opened: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--port", "0", "--nodes", "3"]) == 0
    shown = capsys.readouterr().out
    assert "each of 2 other machines" in shown
    assert "\n  tllm join 10.0.0.1:7000 --token tllm1-abc\n" in shown
    assert "serving listed at http://127.0.0.1:1/v1" in shown


def test_after_a_loss_one_more_is_asked_for(
    folder: Path, opened: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", "3", "--on-loss", "wait", "--cluster-folder", "kept"]
    assert main(["serve", str(folder), "--port", "0", *words]) == 0
    first, then = capsys.readouterr().out.split("--token tllm1-abc")
    assert "each of 2 other machines" in first
    assert "run this on one other machine" in then
    assert "--token tllm1-def" in then


def test_the_key_of_the_command_line_comes_first(
    folder: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_API_KEY", "from-the-environment")
    main(["serve", str(folder), "--port", "0"])
    main(["serve", str(folder), "--port", "0", "--api-key", "from-the-line"])
    assert [one.api_keys for one in opened[2::3]] == [("from-the-environment",), ("from-the-line",)]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--nodes", "4", "--replicas-of-coordinator", "2"], 2, "it takes an odd number up to 9"),
        (["--nodes", "2", "--replicas-of-coordinator", "3"], 2, "need as many machines, and --nodes is 2"),
        (["--nodes", "3", "--plan", "pp=2"], 3, "has 2 ranks and --nodes is 3"),
        (["--local", "2", "--plan", "pp=3"], 3, "has 3 ranks and --local is 2"),
        (["--local", "7"], 3, "7 nodes cannot share 6 layers"),
        (["--local", "2", "--nodes", "2"], 2, "not allowed with argument"),
        (["--host", "0.0.0.0"], 2, "no API key is set"),
        (["--port", "70000"], 2, "is not a port"),
        (["--device", "gpu"], 2, "'gpu' is no device"),
        (["--chat-template", "x.jinja"], 2, "--chat-template needs a tokenizer"),
    ],
)
def test_what_cannot_be(
    options: list[str], code: int, words: str, folder: Path, opened: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), *options]) == code
    assert words in capsys.readouterr().err
    assert not opened


def test_one_that_is_silent_is_not_given_up_before_it_can_be_late(
    opened: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), "--port", "0", "--lost-after", "1"]) == ConfigError.exit_code
    assert "after 1 s of silence" in capsys.readouterr().err and opened == []


def test_memory_is_for_the_workers_here(opened: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["serve", str(folder), "--port", "0", "--memory", "12GiB"]
    monkeypatch.setattr("sys.argv", words)
    assert main(words) == 0 and len(opened) == 3


def test_the_device_is_that_of_the_workers_here(folder: Path) -> None:
    assert cluster_options(engine_options(folder, "pp=2", device="cuda")).device == "cuda"
    assert cluster_options(engine_options(folder, "pp=2")).device == "cpu"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "temperature 0.6, top_k 20 (the model's own; --generation-config vllm serves without)"),
        (["--override-generation-config", '{"top_k": 5}'], "temperature 0.6, top_k 5"),
        (["--generation-config", "vllm", "--override-generation-config", '{"top_k": 5}'], "top_k 5"),
        (["--generation-config", "."], "temperature 0.6, top_k 20"),
    ],
)
def test_only_the_models_own_defaults_are_called_so(
    more: list[str], said: str, folder: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    monkeypatch.chdir(folder)
    logged: list[str] = []
    monkeypatch.setattr(serve.log, "info", lambda form, *values: logged.append(form % values))
    assert main(["serve", str(folder), *more]) == 0
    assert logged == [f"where a request does not say: {said}"]


class _OneOfSeveral:
    """What a first machine serves with that was deposed; its coordinator looks for its successor for ever."""

    served = "what it serves"

    def __init__(self, successor: Address | None = None) -> None:
        self.fault, self.coordinator = Deposed("another coordinates"), self
        self.ended, self.looks, self.broken_off = asyncio.Event(), asyncio.Event(), False
        self.ended.set()
        self._successor = successor

    async def find_successor(self, deposed: Deposed, seconds: float) -> None:
        self.looks.set()
        if self._successor is not None:
            deposed.successor = self._successor
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.broken_off = True
            raise


def _deposed(client: _OneOfSeveral, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """What the application was told, and how it follows the cluster's end."""
    said = list[str]()
    store = type("Store", (), {"refuse": lambda *words: said.append("stored replies refused")})
    monkeypatch.setattr(serve, "LocalStreamStore", store)
    monkeypatch.setattr(serve, "RemoteStreamStore", lambda *words: SimpleNamespace(rest=None))
    app = SimpleNamespace(store=store(), stop=lambda: said.append("stopped"))
    lasting = SimpleNamespace(refuse=lambda fault: said.append("requests refused"))
    follow: Any = serve._stop_with_cluster
    return said, lambda stop: follow(client, app, lasting, SimpleNamespace(link=None), stop)


@pytest.mark.parametrize("before", [False, True])
def test_who_is_told_to_end_looks_for_no_successor(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        client, stop = _OneOfSeveral(), asyncio.Event()
        said, follow = _deposed(client, monkeypatch)
        if before:
            stop.set()
        following = asyncio.create_task(follow(stop))
        if not before:
            await client.looks.wait()
            assert not stop.is_set() and "stopped" not in said
            stop.set()
        await following
        assert client.broken_off is not before and client.looks.is_set() is not before
        assert client.fault.was_sought, "nobody looks again when the cluster is closed"
        assert not serve._is_succeeded(client)  # type: ignore[arg-type]
        assert said == ["requests refused", "stored replies refused", "stopped"]

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_successor_that_is_found_goes_on_with_what_is_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        client, stop = _OneOfSeveral(("10.0.0.2", 7000)), asyncio.Event()
        said, follow = _deposed(client, monkeypatch)
        await follow(stop)
        assert stop.is_set() and serve._is_succeeded(client)  # type: ignore[arg-type]
        assert said == ["requests refused", "stored replies refused"]

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_adapters_are_looked_at_before_models_are_fetched_and_loaded(
    folder: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["serve", str(folder), "--port", "0", "--lora-modules"]
    assert main([*asked, f"a={save_adapter(folder, folder / 'a', rank=20)}", "--enable-lora"]) == 2
    assert "/a: the adapter has rank 20 and adapters up to rank 16 are served" in capsys.readouterr().err
    monkeypatch.setattr("tllm.cli.commands.serve.resolve_model", lambda *given: pytest.fail("it fetches the model"))
    assert main([*asked, "a=none", "--enable-lora"]) == 2
    assert "none is no folder here" in capsys.readouterr().err
    assert not opened
