"""The engine, through pages, chunks, preemption and every layout, writes the same greedy ids as `transformers`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.models.families import FAMILIES, save_model
from tests.support.selection import EACH_PART, in_turn
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import SamplingParams

LAYOUTS = ("pp=1", "tp=2", "tp=3,shares=1:2:1", "pp=2", "pp=3,layers=1+2+1", "pp=2,tp=2", "pp=2,tp=1+2")
TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
LENGTHS = (3, 17, 29, 40)
ROOMY = EngineConfig(dtype="float32", cache_tokens=512)
CHUNKED = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=11)
DRAFTED = EngineConfig(dtype="float32", cache_tokens=512, num_speculative_tokens=4)
TIGHT = EngineConfig(dtype="float32", cache_tokens=128, page_size=4, max_num_seqs=4, max_num_batched_tokens=48)
ALONE_TOO = ("llama", "mistral", "gemma2", "qwen3_moe", "gpt_oss_moe", "deepseek_v3_moe")
"""Of each kind of attention one: with `make test` these are put into chunks, drafted and preempted."""


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
                ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            out.append(done[0, len(prompt) :].tolist())
    return out


@EACH_PART
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.timeout(180)
def test_greedy_ids_equal_transformers(case: str, part: str, tmp_path: Path) -> None:
    truth = greedy_truth(save_model(case, tmp_path))
    assert len({tuple(ids) for ids in truth}) >= 3, "nearly every prompt must lead somewhere of its own"
    roomy = [(layout, ROOMY) for layout in LAYOUTS]
    hard = [(layout, sizes) for layout in ("pp=2,tp=1+2", "pp=1") for sizes in (CHUNKED, DRAFTED, TIGHT)]
    if case in ALONE_TOO:
        turns = [*in_turn(roomy, case, ALONE_TOO, part), *in_turn(hard, case, ALONE_TOO, part, count=1)]
    else:
        turns = in_turn([*roomy, *hard], case, FAMILIES, part, count=1)
    for layout, sizes in turns:
        with Engine.load(tmp_path, layout, sizes) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, f"{layout} with {sizes}"
            if sizes is TIGHT:
                assert engine.stats()["preemptions"] > 0, "the cache was meant to be too small"
