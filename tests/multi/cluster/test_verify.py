"""`verify` with real processes: the split model is equal; one weight that one process holds otherwise is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.models.families import save_model
from tests.support.models.quantized_folders import FORMATS, save_quantized
from tllm.cli.main import main
from tllm.node.verify.verify import verify
from tllm.spec.plan import Plan

pytestmark = pytest.mark.usefixtures("own_process")

IDS = (1, 17, 100, 5, 66, 42, 8, 9)

DAMAGE = """
import sys
from pathlib import Path
if "tllm.node.fork_server" in sys.orig_argv:
    from tllm.node.roles.verify_rank import VerifyRank
    load = VerifyRank.load

    def load_and_damage(self, progress):
        loaded = load(self, progress)
        if self.rank == 2:
            dict(self._model.named_parameters())["layers.3.mlp.down_proj.weight"].data[5, 7] += 0.5
            Path(__file__).with_name("damaged").touch()
        return loaded

    VerifyRank.load = load_and_damage
"""
"""What Python runs when a process begins, if it lies on its path by the name sitecustomize."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


def test_a_split_model_is_equal(model: Path) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            found = await verify(model, Plan.parse("pp=2,tp=1+2", 4), "float64", IDS)
            assert found.damaged == ()
            assert found.worst < 1e-12
            assert len(found.differs) > 0, "sums in another order leave their traces, so it was compared"
            assert {one.what for one in found.differs} <= {"layer 2", "layer 3", "logits"}, (
                "a stage of one rank is exact"
            )

    asyncio.run(limited())
    assert wait_until_gone(descendants()) == []


@pytest.mark.parametrize("plan", ["pp=2,tp=1+4,tensor=2d", pytest.param("tp=8,tensor=2.5d", marks=pytest.mark.soak)])
def test_a_model_on_a_grid_is_equal(plan: str, model: Path) -> None:
    """Every rank's columns, and on several squares its rows, of every layer; every weight is that of the file."""

    async def limited() -> None:
        async with asyncio.timeout(200):
            found = await verify(model, Plan.parse(plan, 4), "float64", IDS)
            assert found.damaged == ()
            assert 0 < found.worst < 1e-12

    asyncio.run(limited())
    assert wait_until_gone(descendants()) == []


@pytest.mark.soak  # `test_gguf_cluster` verifies a model of few bits
def test_a_quantised_model_is_equal_too(model: Path, tmp_path: Path) -> None:
    save_quantized(model, tmp_path / "awq", FORMATS["awq"])

    async def limited() -> None:
        async with asyncio.timeout(200):
            found = await verify(tmp_path / "awq", Plan.parse("tp=3,shares=1:2:1", 4), "float64", IDS)
            assert found.damaged == ()
            assert 0 < found.worst < 1e-12

    asyncio.run(limited())
    assert wait_until_gone(descendants()) == []


def test_a_damaged_weight_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DAMAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = main(["verify", str(model), "--plan", "pp=2,tp=1+2", "--prompt-ids", "1,17,100,5", "--quiet"])
    assert (tmp_path / "damaged").exists(), "no weight was damaged, so there was nothing to name"
    assert code == 1
    shown = capsys.readouterr().out
    assert "not equal: rank 2 holds model.layers.3.mlp.down_proj.weight[" in shown
    assert "that is in layer 3, and 1 such piece in all" in shown
    assert "layer 3 differs there by 0." in shown
