"""Embeddings of a sentence-transformers folder with `Dense` modules: its arithmetic, in one process and on nodes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from tests.parity.engine.test_bidirectional import exact, save
from tests.parity.engine.test_generation import prompts
from tests.parity.engine.test_pooling import truth
from tllm import LLM
from tllm.api.engine_options import engine_options
from tllm.cluster.certificates import Authority
from tllm.core.errors import ConfigError, WeightsError
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.replication.replica_host import check_readable
from tllm.node.replication.replicated_work import replicated_work, workload_of
from tllm.node.replication.succession import Office
from tllm.node.serve import dense_layers
from tllm.node.serve.dense_layers import DenseLayers, check_dense
from tllm.node.serve.open_cluster import serving_workload
from tllm.node.serve.serving import Serving
from tllm.node.serve.takeover import take_over_serving
from tllm.spec.request import Output, PoolingKind, PoolingParams, Request, SamplingParams

__all__ = ["exact"]  # a fixture of every test here

IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


def add_modules(folder: Path, width: int) -> list[torch.nn.Module]:
    """As EmbeddingGemma has them: a mean, two linears, and a norm; but the second has a bias and a tanh."""
    chance = torch.Generator().manual_seed(5)
    kinds = ["Transformer", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    listed = [
        {"path": kind if at else "", "type": f"sentence_transformers.models.{kind[2:] if at else kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for kind in kinds[1:]:
        (folder / kind).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    made: list[torch.nn.Module] = []
    for kind, (inner, outer), bias, activation in (
        ("2_Dense", (width, 96), False, IDENTITY),
        ("3_Dense", (96, 20), True, TANH),
    ):
        linear = torch.nn.Linear(inner, outer, bias=bias)
        for parameter in linear.parameters():
            parameter.data.normal_(0, inner**-0.5, generator=chance)
        config = {"in_features": inner, "out_features": outer, "bias": bias, "activation_function": activation}
        (folder / kind / "config.json").write_text(json.dumps(config))
        save_file(
            {f"linear.{name}": value for name, value in linear.state_dict().items()},
            folder / kind / "model.safetensors",
        )
        made += [linear.double(), torch.nn.Tanh() if activation == TANH else torch.nn.Identity()]
    return made


def test_embeddings_go_through_them(tmp_path: Path) -> None:
    model = save("gemma3", tmp_path)
    layers = torch.nn.Sequential(*add_modules(tmp_path, 48))
    with LLM(tmp_path, dtype="float64", max_model_len=64) as llm, torch.inference_mode():
        for got, ids in zip(llm.embed(prompts()), prompts(), strict=True):
            want = torch.nn.functional.normalize(layers(truth(model, "mean", ids)), dim=0)
            torch.testing.assert_close(torch.tensor(got.embedding, dtype=torch.float64), want, rtol=1e-8, atol=1e-8)
        [short] = llm.embed([prompts()[0]], dimensions=7)
        assert len(short.embedding) == 7
        with pytest.raises(Exception, match="this model's embeddings have 20"):
            llm.embed([prompts()[0]], dimensions=21)


@pytest.mark.parametrize(
    ("kind", "is_changed"), [("mean", True), ("last", True), ("score", False), ("logprobs", False)]
)
def test_a_cluster_s_outputs_go_through_them(kind: PoolingKind, is_changed: bool, tmp_path: Path) -> None:
    """Whoever asks: nodes' HTTP servers get theirs from here."""
    save("qwen2", tmp_path)
    layers = torch.nn.Sequential(*add_modules(tmp_path, 48))
    values = tuple(float(n) / 7 for n in range(48))

    async def outputs(request: Request) -> AsyncGenerator[Output, None]:
        yield Output(request_id="r", pooled=values, finish_reason="stop")

    async def asked() -> list[Output]:
        work = serving_workload(tmp_path, "pp=2", EngineConfig(cache_tokens=256))
        cluster = Serving(work, Authority.create(), LOOPBACK)
        cluster.requests.submit = outputs  # type: ignore[method-assign]
        pooling = PoolingParams(kind=kind, token_ids=(1,) if kind == "logprobs" else ())
        request = Request(id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=1), pooling=pooling)
        found = [output async for output in cluster.submit(request)]
        cluster.coordinator.control_server.close()
        return found

    [output] = asyncio.run(asked())
    with torch.inference_mode():
        want = layers(torch.tensor(values, dtype=torch.float64)).tolist()
    assert output.finish_reason == "stop"
    assert output.pooled == (pytest.approx(want, rel=1e-12) if is_changed else values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: save_file({"linear.weight": torch.zeros(96, 47)}, folder / "model.safetensors"), r"\[96, 47\]"),
        (
            lambda folder: save_file({"weight": torch.zeros(96, 48)}, folder / "model.safetensors"),
            "no tensor 'linear.weight'",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_module(change: Any, words: str, tmp_path: Path) -> None:
    add_modules(tmp_path, 48)
    change(tmp_path / "2_Dense")
    with pytest.raises(WeightsError, match=words):
        DenseLayers(tmp_path)((0.0,) * 48)
    with pytest.raises(WeightsError, match=words):
        check_dense(tmp_path)


def test_weights_that_are_missing_are_refused_at_the_start(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    add_modules(tmp_path, 48)
    options = engine_options(tmp_path)
    assert options.pooling().hidden_size == 20
    (tmp_path / "3_Dense" / "model.safetensors").rename(tmp_path / "3_Dense" / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"3_Dense has no model\.safetensors"):
        options.pooling()


def test_threads_that_embed_at_once_read_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_modules(tmp_path, 48)
    layers, read, count = DenseLayers(tmp_path), dense_layers._read, 0

    def slow(module: Any) -> Any:
        nonlocal count
        count += 1
        time.sleep(0.05)
        return read(module)

    monkeypatch.setattr(dense_layers, "_read", slow)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(layers, [(1.0,) * 48] * 4))
    assert count == 2 and len(set(results)) == 1, "one for each module"


@pytest.mark.parametrize("missing", ["modules.json", "2_Dense/config.json", "3_Dense/model.safetensors"])
def test_no_machine_takes_over_that_lacks_a_file_of_them(missing: str, tmp_path: Path) -> None:
    """It would embed without them, and nobody would know."""
    save("qwen2", tmp_path)
    plain = serving_workload(tmp_path, "pp=2", EngineConfig(cache_tokens=256))
    add_modules(tmp_path, 48)
    work = serving_workload(tmp_path, "pp=2", EngineConfig(cache_tokens=256))
    kept = workload_of(replicated_work(work, "replan", 3), "", 0)
    check_readable(kept.reads)
    assert plain.reads == () and len(kept.reads) == 5
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=rf"{missing} cannot be read on"):
        check_readable(kept.reads)
    office = SimpleNamespace(state=None, workload=lambda: kept)
    with pytest.raises(ConfigError, match=rf"{missing} cannot be read on"):
        asyncio.run(take_over_serving(cast(Office, office)))


def test_a_folder_that_cannot_embed_still_writes(tmp_path: Path) -> None:
    """What is wrong with its modules shows when an embedding is asked for."""
    (tmp_path / "modules.json").write_text("[")

    async def outputs() -> AsyncGenerator[Output, None]:
        yield Output(request_id="r", token_ids=(1,))

    async def asked() -> list[Output]:
        request = Request(id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=1))
        return [output async for output in DenseLayers(tmp_path).follow(request, outputs())]

    assert asyncio.run(asked())[0].token_ids == (1,)
