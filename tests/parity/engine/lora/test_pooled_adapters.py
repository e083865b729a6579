"""Prompts that are pooled with LoRA adapters: what PEFT merges, in float64 and beside prompts of the model alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.parity.engine.lora.test_lora import TARGETS, engine_with
from tests.parity.engine.test_generation import LAYOUTS, prompts
from tests.parity.engine.test_pooling import CASES, KINDS, NOTHING, TOKENS, truth
from tests.support.models.adapters import peft_adapter
from tests.support.models.families import SHAPE, save_model
from tests.support.selection import EACH_PART, in_turn
from tllm.engine.engine import Engine
from tllm.spec.request import PoolingKind, PoolingParams, Request

LINEARS = ("q_proj", "v_proj", "o_proj")
ADAPTED = [case for case in CASES if case in TARGETS]


def pooled(engine: Engine, kind: PoolingKind, loras: Sequence[str]) -> list[Tensor]:
    """What each prompt comes to with each adapter, all in the same batches: [prompts, width] for each."""
    params = PoolingParams(kind=kind, token_ids=TOKENS if kind == "logprobs" else ())
    streams = [
        [
            engine.submit(Request(id=f"{lora}-{i}", prompt_ids=tuple(ids), params=NOTHING, pooling=params, lora=lora))
            for i, ids in enumerate(prompts())
        ]
        for lora in loras
    ]
    return [
        torch.tensor([[x for output in stream for x in output.pooled] for stream in of_one], dtype=torch.float64)
        for of_one in streams
    ]


def check(base: Path, merged: Path, adapter: Path, layout: str, kinds: Sequence[PoolingKind]) -> None:
    """The adapter beside the model is the merged model, and the model alone stays what it is, to ten digits."""
    sizes = {"dtype": "float64", "cache_tokens": 512, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    want, bare = dict[str, Tensor](), dict[str, Tensor]()
    for folder, found in ((merged, want), (base, bare)):
        with engine_with(folder, [], **sizes) as (engine, _):  # type: ignore[arg-type]
            found |= {kind: pooled(engine, kind, [""])[0] for kind in kinds}
    with engine_with(base, [adapter], layout, **sizes) as (engine, (lora,)):  # type: ignore[arg-type]
        for kind in kinds:
            with_it, without = pooled(engine, kind, [lora, ""])
            torch.testing.assert_close(with_it, want[kind], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(without, bare[kind], rtol=1e-10, atol=1e-10)
            assert (want[kind] - bare[kind]).abs().max() > 0.1, "an adapter that does nothing would hide a fault"


@EACH_PART
@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.timeout(180)
def test_embeddings_and_log_probabilities_are_those_of_what_peft_merges(case: str, part: str, tmp_path: Path) -> None:
    model = save_model(case, tmp_path / "base")
    peft = peft_adapter(model, tmp_path / "adapter", TARGETS[case])
    want = {kind: torch.stack([truth(peft, kind, ids) for ids in prompts()]) for kind in KINDS}  # type: ignore[arg-type]
    with engine_with(tmp_path / "base", [tmp_path / "adapter"], "pp=2", max_num_seqs=16) as (engine, (lora,)):
        for kind in KINDS:
            torch.testing.assert_close(pooled(engine, kind, [lora])[0], want[kind], rtol=1e-5, atol=3e-5)
    peft.double().merge_and_unload().save_pretrained(tmp_path / "merged")
    for layout in in_turn(LAYOUTS, case, ADAPTED, part, count=1):
        check(tmp_path / "base", tmp_path / "merged", tmp_path / "adapter", layout, KINDS)


def test_an_adapter_of_a_model_without_its_head(tmp_path: Path) -> None:
    """As PEFT has it to embed: names in its file lack the first part."""
    model = save_model("qwen3", tmp_path / "base")
    peft = peft_adapter(model.model, tmp_path / "adapter", TARGETS["qwen3"], task_type="FEATURE_EXTRACTION")
    peft.double().merge_and_unload()
    model.double().save_pretrained(tmp_path / "merged")
    check(tmp_path / "base", tmp_path / "merged", tmp_path / "adapter", "pp=2,tp=1+2", ("last", "mean"))


@pytest.mark.parametrize("layout", ["pp=1", "tp=3,shares=1:2:1", "pp=2,tp=1+2"])
def test_a_classification_head_after_an_adapter(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SHAPE, num_labels=3)).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "base")
    peft_adapter(model, tmp_path / "adapter", LINEARS).double().merge_and_unload().save_pretrained(tmp_path / "merged")
    check(tmp_path / "base", tmp_path / "merged", tmp_path / "adapter", layout, ("score", "last"))


def test_a_model_that_sees_both_ways(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "base")
    peft_adapter(model, tmp_path / "adapter", LINEARS).double().merge_and_unload().save_pretrained(tmp_path / "merged")
    for folder in (tmp_path / "base", tmp_path / "merged"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    check(tmp_path / "base", tmp_path / "merged", tmp_path / "adapter", "pp=2,tp=1+2", ("last", "mean"))
