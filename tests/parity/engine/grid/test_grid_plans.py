"""The engine on grids of ranks (2D, 2.5D and 3D tensor parallelism) writes what `transformers` and one process do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.parity.engine.lora.test_lora import TARGETS, scores
from tests.parity.engine.test_engine_outputs import scored, values
from tests.parity.engine.test_generation import CHUNKED, DRAFTED, GREEDY, ROOMY, TIGHT, greedy_truth, prompts
from tests.parity.engine.test_pooling import KINDS, pooled
from tests.parity.engine.test_stored_prefixes import asked, on_disk
from tests.support.models.adapters import peft_adapter, peft_dora
from tests.support.models.families import save_model
from tests.support.selection import EACH_PART, in_turn
from tllm.core.errors import PlanError
from tllm.engine.engine import Engine
from tllm.engine.grid.grid_stage import GridModel
from tllm.engine.schedule.limits import EngineConfig
from tllm.model.transformer import build
from tllm.parallel.collectives import reduce_from
from tllm.parallel.grid import stationary
from tllm.parallel.lora.adapted_model import module_shapes
from tllm.parallel.mesh import whole
from tllm.parallel.sequence_parallel import TensorParallelRegion
from tllm.weights.lora.held_adapter import HeldAdapter, HeldFiles

GRIDS = (
    *("tp=4,tensor=2d", "tp=8,tensor=3d", "tp=8,tensor=2.5d"),
    *("pp=2,tp=1+4,tensor=2d", "pp=2,tp=8+1,tensor=2.5d", "pp=2,tp=4,tensor=2d"),
)
FAMILIES = (
    *("llama", "llama_mha_tied_bias", "llama_mqa", "llama_dynamic", "qwen2", "qwen3", "mistral", "phi3"),
    *("gemma2", "gemma3", "olmo2"),
)
"""Tied and untied tables, biases, fused projections, norms of heads and of all heads, windows, caps, scaled embeddings:
what dense models have."""

SIZES = (ROOMY, CHUNKED, DRAFTED, TIGHT)
EXACT = msgspec.structs.replace(TIGHT, dtype="float64")


@EACH_PART
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.timeout(180)
def test_greedy_ids_equal_transformers(case: str, part: str, tmp_path: Path) -> None:
    """Several prompts and replies of one row each; whole and in chunks, with drafts, and with too few pages."""
    truth = greedy_truth(save_model(case, tmp_path))
    at = FAMILIES.index(case)
    for layout in in_turn(GRIDS, case, FAMILIES, part, count=1):
        sizes = SIZES[(at // len(GRIDS) + at) % len(SIZES)]
        with Engine.load(tmp_path, layout, sizes) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, f"{layout} with {sizes}"
            assert engine.generate(prompts()[:1], GREEDY) == truth[:1], f"{layout}: one row alone"
            if sizes is TIGHT:
                assert engine.stats()["preemptions"] > 0, "the cache was meant to be too small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grids")
    save_model("gemma2", path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRIDS)
def test_sampled_tokens_and_log_probabilities_are_those_of_one_process(layout: str, folder: Path) -> None:
    with Engine.load(folder, "pp=1", EXACT) as engine:
        want = scored(engine, prompts()[2])
    with Engine.load(folder, layout, EXACT) as engine:
        got = scored(engine, prompts()[2])
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert values(got) == pytest.approx(values(want), abs=1e-12)


@pytest.mark.parametrize("layout", GRIDS[:3])
def test_in_float32_log_probabilities_are_as_near_as_with_other_plans(layout: str, folder: Path) -> None:
    with Engine.load(folder, "pp=1", EXACT) as engine:
        want = scores(engine, "", prompts()[3])
    with Engine.load(folder, layout, ROOMY) as engine:
        torch.testing.assert_close(scores(engine, "", prompts()[3]), want, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRIDS[1:4])
def test_a_prefix_is_found_and_read_by_whoever_computes_what_follows(layout: str, folder: Path) -> None:
    """On several squares other ranks than before."""
    longer = [prompts()[3], [*prompts()[3], 5, 6, 7], [*prompts()[3][:33], 9]]
    with Engine.load(folder, "pp=1", msgspec.structs.replace(ROOMY, enable_prefix_caching=False)) as engine:
        want = [engine.generate([prompt], GREEDY) for prompt in longer]
    with Engine.load(folder, layout, ROOMY) as engine:
        assert [engine.generate([prompt], GREEDY) for prompt in longer] == want
        assert engine.stats()["prefix_hits"] >= 64


def test_pages_on_disk_go_from_other_plans_to_grids_and_back(folder: Path, tmp_path: Path) -> None:
    """Both ranks of a column have the same heads, and keep the same pages."""
    prompt, want = prompts()[3], list[int]()
    for layout in ("pp=1", "tp=4,tensor=2d", "tp=8,tensor=2.5d", "pp=2,tp=1+4,tensor=2d", "tp=2"):
        with Engine.load(folder, layout, on_disk(tmp_path)) as engine:
            ids, found = asked(engine, prompt)
            assert ids == (want or ids), layout
            assert found == (36 if want else 0), layout  # 4 tokens to a page
            assert engine.stats()["page_store_damaged"] == 0
        want = ids


@pytest.mark.parametrize("layout", [GRIDS[0], GRIDS[4]])
def test_pooled_prompts_and_cached_codes_are_those_of_one_process(layout: str, folder: Path) -> None:
    coded = msgspec.structs.replace(CHUNKED, kv_cache_dtype="int8", dtype="float64")
    with Engine.load(folder, "pp=1", coded) as engine:
        want = [pooled(engine, kind, prompts()) for kind in KINDS]
    with Engine.load(folder, layout, coded) as engine:
        for kind, of_kind in zip(KINDS, want, strict=True):
            for got, one in zip(pooled(engine, kind, prompts()), of_kind, strict=True):
                assert got == pytest.approx(one, abs=1e-9), kind


@contextmanager
def adapted(folder: Path, adapter: Path, layout: str) -> Iterator[tuple[Engine, str]]:
    """An engine on a grid that has loaded an adapter, and its id."""
    sizes = EngineConfig(cache_tokens=1024, max_model_len=128, dtype="float64")
    with Engine.load(folder, layout, sizes) as engine:
        shapes = module_shapes(build(engine.spec, whole(engine.spec), torch.float32, "meta"))
        held = HeldAdapter.read(adapter.name, adapter, shapes, 16)
        for stage in engine.stages:
            model = stage.model
            assert isinstance(model, GridModel)
            updates = held.adapter.load(model.model, HeldFiles(held.contents), stage.cache.dtype, model.grid.row)
            stage.adapters.add(held.lora, updates)
        yield engine, held.lora


@pytest.mark.parametrize("layout", GRIDS[:3])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_add_what_peft_merges(kind: str, layout: str, tmp_path: Path) -> None:
    truth, targets = save_model("llama", tmp_path / "base"), TARGETS["llama"]
    config: dict[str, Any] = dict(rank_pattern={targets[-1]: 6}, use_rslora=True)
    if kind == "dora":
        peft = peft_dora(truth, tmp_path / "adapter", targets, **config)
    else:
        peft = peft_adapter(truth, tmp_path / "adapter", targets, **config)
    peft.double().merge_and_unload().save_pretrained(tmp_path / "merged")
    with Engine.load(tmp_path / "merged", "pp=1", msgspec.structs.replace(ROOMY, dtype="float64")) as engine:
        want = scores(engine, "")
    with adapted(tmp_path / "base", tmp_path / "adapter", layout) as (engine, lora):
        bare = scores(engine, "")
        torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=1e-10)
        assert (want - bare).abs().max() > 0.1, "an adapter that does nothing would hide a fault"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("qwen3_moe", "a qwen3_moe model with experts: this is not cut both ways"),
        ("deepseek_v3_moe", "not cut both ways"),
        ("gpt_oss_moe", "not cut both ways"),
        ("gemma4_e2b", "not cut both ways"),
    ],
)
def test_models_that_no_grid_is_for_are_refused_in_one_line(case: str, says: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    with pytest.raises(PlanError, match=says) as refused:
        Engine.load(tmp_path, "tp=4,tensor=2d", ROOMY)
    assert refused.value.hint == "leave tensor out: all models are cut one way (tensor=1d)"


def test_weights_of_few_bits_are_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match="weights of few bits: this is not cut both ways"):
        Engine.load(folder, "tp=4,tensor=2d", msgspec.structs.replace(ROOMY, quantize="int8"))


@pytest.mark.parametrize("axis", ["row", "width"])
def test_a_sum_that_one_rank_leaves_out_shows(axis: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes part and keeps its own part."""
    with Engine.load(folder, "pp=1", EXACT) as engine:
        want = scores(engine, "", prompts()[2])

    class Forgetful(TensorParallelRegion):
        def leave(self, y_TD: torch.Tensor) -> torch.Tensor:
            whole = reduce_from(y_TD.clone(), self.tp)
            return y_TD if self.tp.name == {"row": "row", "width": "column"}[axis] and self.tp.rank == 1 else whole

    monkeypatch.setattr(stationary, "TensorParallelRegion", Forgetful)
    with Engine.load(folder, "tp=4,tensor=2d", EXACT) as engine:
        assert (scores(engine, "", prompts()[2]) - want).abs().max() > 1e-3
