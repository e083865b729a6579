"""A GGUF model over processes: the tokens are those of one process, and a node without the files fetches its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT
from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tllm.cli.main import main
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator import coordinator as coordinator_module
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.node.weights.model_folder import ModelFolder
from tllm.spec.request import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("own_process")

TINY = ROOT / "models" / "tiny"
SIZES = EngineConfig(cache_tokens=512, max_model_len=256, dtype="float32")
PROMPT = (1, 2, 3, 4)
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in blocks of Q8_0, in several files."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(SavedModel(TINY), path, lambda name: "Q8_0", with_tokenizer(TINY), split=20)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[int]:
    with Engine.load(model, "pp=1", SIZES) as engine:
        return engine.generate([PROMPT], GREEDY)[0]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            await scene()

    asyncio.run(limited())
    assert wait_until_gone(descendants()) == []


async def ids(cluster: Serving) -> list[int]:
    request = Request(id="r", prompt_ids=PROMPT, params=GREEDY)
    return [token async for output in cluster.submit(request) for token in output.token_ids]


def test_a_node_that_lacks_the_files_fetches_its_part(
    model: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOneNode(ModelFolder):
        """Of the nodes, only the first that is told of the files finds them."""

        told = 0

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name != "path" or not hasattr(self, "files"):
                return value
            AtOneNode.told += 1
            return value if AtOneNode.told == 1 else Path("/nowhere") / value.name

    monkeypatch.setattr(coordinator_module, "ModelFolder", AtOneNode)

    async def scene() -> None:
        async with open_cluster(model, "pp=2", SIZES) as cluster:
            assert await ids(cluster) == truth
            assert cluster.model_name == model.stem
            nodes = cluster.status()["nodes"]
            size = sum(path.stat().st_size for path in model.parent.iterdir())
            fetched = sorted(node["bytes_fetched"] for node in nodes)
            assert fetched[0] == 0, "one has the files"
            assert 0 < fetched[1] < 0.8 * size, "and the other gets its layers and the header, no more"

    play(scene)


@pytest.mark.soak  # the last one compares a model that is divided so, number by number
@pytest.mark.parametrize("plan", ["tp=3,shares=1:2:1"])
def test_every_plan_gives_the_same_tokens(plan: str, model: Path, truth: list[int]) -> None:
    async def scene() -> None:
        async with open_cluster(model, plan, SIZES) as cluster:
            assert await ids(cluster) == truth

    play(scene)


def test_the_divided_model_is_verified_against_the_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(model), "--plan", "tp=2", "--prompt-ids", "1,17,100,5", "--dtype", "float64", "--quiet"]
    assert main(words) == 0
    assert "equal" in capsys.readouterr().out
