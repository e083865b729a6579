"""The engine on CUDA writes what it writes on the processor: in float32, for kinds of layers and plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.families import FAMILIES, save_model
from tllm.devices.choose import CPU
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")

CUDA = torch.device("cuda", 0)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=5, ignore_eos=True)
SAMPLED_BY_DEVICE = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
"""Nothing of a step waits for the host, so that the next one begins early."""

ROOMY = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=6, max_num_batched_tokens=64)
TIGHT = EngineConfig(dtype="float32", cache_tokens=128, page_size=4, max_num_seqs=4, max_num_batched_tokens=11)
CODED = EngineConfig(dtype="float32", cache_tokens=512, kv_cache_dtype="int8", max_num_seqs=6)
RECORDED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "granite", "gemma4_e2b")
"""Families whose steps are recorded as graphs."""
OTHERS = ("qwen3_moe", "gpt_oss_moe", "deepseek_v3_moe", "qwen3_next_moe", "llama_dynamic")


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(3, 101, (length,), generator=chance).tolist() for length in (3, 17, 29, 40, 5)]


@pytest.mark.parametrize("case", [*RECORDED, *OTHERS])
def test_a_family(case: str, tmp_path: Path) -> None:
    if case not in FAMILIES:
        pytest.skip("this transformers does not know it")
    save_model(case, tmp_path)
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine:
        want = [engine.generate(prompts(), params) for params in (GREEDY, SAMPLED, SAMPLED_BY_DEVICE)]
    for plan, sizes, devices in [("pp=1", ROOMY, (CUDA,)), ("pp=2", TIGHT, (CUDA, CPU))]:
        with Engine.load(tmp_path, plan, sizes, devices=devices) as engine:
            assert (engine.stages[0].graphs is not None) == (case in RECORDED)
            assert (engine.driver.overlap is not None) == (case in RECORDED and plan == "pp=1")
            found = [engine.generate(prompts(), params) for params in (GREEDY, SAMPLED, SAMPLED_BY_DEVICE)]
            assert found == want, plan


def test_two_ranks_of_one_process_on_one_device(tmp_path: Path) -> None:
    """Both record their steps when they are made, at the same time."""
    save_model("llama", tmp_path)
    with Engine.load(tmp_path, "pp=1", ROOMY) as engine:
        want = engine.generate(prompts(), GREEDY)
    with Engine.load(tmp_path, "pp=2", TIGHT, devices=(CUDA, CUDA)) as engine:
        assert all(stage.graphs is not None for stage in engine.stages)
        assert engine.generate(prompts(), GREEDY) == want


def test_a_cache_of_codes(tmp_path: Path) -> None:
    """Most ids are those of the processor: a key between two codes may fall to either side."""
    save_model("llama", tmp_path)
    with Engine.load(tmp_path, "pp=1", CODED) as engine:
        want = engine.generate(prompts(), GREEDY)
    with Engine.load(tmp_path, "pp=1", CODED, devices=(CUDA,)) as engine:
        got = engine.generate(prompts(), GREEDY)
    assert sum(ours == theirs for ours, theirs in zip(got, want, strict=True)) >= 4
