"""The engine, through pages, chunks, preemption and every layout, writes the same greedy ids as `transformers`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.models.families import FAMILIES, save_model
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import SamplingParams

LAYOUTS = ("pp=1", "tp=2", "tp=3,shares=1:2:1", "pp=2", "pp=3,layers=1+2+1", "pp=2,tp=2", "pp=2,tp=1+2")
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
LENGTHS = (3, 17, 29, 40)
ROOMY = EngineConfig(dtype="float32", cache_tokens=512)
CHUNKED = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=11)
DRAFTED = EngineConfig(dtype="float32", cache_tokens=512, num_speculative_tokens=4)
TIGHT = EngineConfig(dtype="float32", cache_tokens=128, page_size=4, max_num_seqs=4, max_num_batched_tokens=48)


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(3, 101, (length,), generator=chance).tolist() for length in LENGTHS]


def greedy_truth(model: transformers.PreTrainedModel) -> list[list[int]]:
    """transformers, one prompt at a time, each on a fresh copy: its dynamic rope remembers the longest so far."""
    out = []
    with torch.inference_mode():
        for prompt in prompts():
            ids = torch.tensor([prompt])
            done = copy.deepcopy(model).generate(
                ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            out.append(done[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.timeout(180)
def test_greedy_ids_equal_transformers(case: str, tmp_path: Path) -> None:
    truth = greedy_truth(save_model(case, tmp_path))
    assert len({tuple(ids) for ids in truth}) == len(LENGTHS), "every prompt must lead somewhere of its own"
    for layout in LAYOUTS:
        with Engine.load(tmp_path, layout, ROOMY) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, layout
    for layout in ("pp=1", "pp=2,tp=1+2"):
        with Engine.load(tmp_path, layout, CHUNKED) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, f"{layout} in chunks"
        with Engine.load(tmp_path, layout, DRAFTED) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, f"{layout} with drafts"
        with Engine.load(tmp_path, layout, TIGHT) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, f"{layout} with few pages"
            assert engine.stats()["preemptions"] > 0, "the cache was meant to be too small"
