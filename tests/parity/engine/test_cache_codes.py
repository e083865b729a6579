"""A cache in one byte each: every layout, chunk, draft, preemption and prefix writes what the slow twin writes.

The twin computes the whole sequence again for each token, in float64 and without a cache, and attends to keys and
values that numpy has rounded row by row.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.rounded_rows import RoundedModel
from tests.support.selection import EACH_PART, in_turn
from tllm.core.errors import ConfigError
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import Request, SamplingParams

FAMILIES = {
    "llama": dict(head_dim=16),  # whole vectors: single tokens are read by the kernel
    "gemma2": dict(head_dim=16),  # caps and windows
    "gpt_oss_moe": dict(),  # sinks and windows
    "deepseek_v3_moe": dict(kv_lora_rank=28),  # latents, which are keys and values
}
LAYOUTS = ("pp=1", "tp=2", "tp=3,shares=1:2:1", "pp=3,layers=1+2+1", "pp=2,tp=1+2")
REPLY = 10
GREEDY = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True)
ROOMY = EngineConfig(dtype="float32", cache_tokens=512, page_size=4)
CHUNKED = msgspec.structs.replace(ROOMY, max_num_seqs=4, max_num_batched_tokens=11)
DRAFTED = msgspec.structs.replace(ROOMY, num_speculative_tokens=4)
TIGHT = msgspec.structs.replace(ROOMY, cache_tokens=48, max_num_seqs=4, max_num_batched_tokens=48)
LONG = torch.randint(3, 101, (41,), generator=torch.Generator().manual_seed(3)).tolist()


def prompts() -> list[list[int]]:
    """Of which two begin alike."""
    chance = torch.Generator().manual_seed(2)
    first, second, third = (torch.randint(3, 101, (n,), generator=chance).tolist() for n in (26, 5, 9))
    return [first, second, first[:17] + third]


@EACH_PART
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_ids_are_those_of_the_twin(case: str, kind: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path, **FAMILIES[case])
    twin = RoundedModel(tmp_path, kind)
    truth = [twin.greedy(prompt, REPLY) for prompt in prompts()]
    assert len({tuple(ids) for ids in truth}) == len(truth), "every prompt must lead somewhere of its own"
    ways = [(layout, ROOMY) for layout in LAYOUTS]
    ways += [(LAYOUTS[-1], config) for config in (CHUNKED, DRAFTED, TIGHT)]
    for layout, config in in_turn(ways, case, FAMILIES, part, count=3 if kind == "int8" else 2):
        with Engine.load(tmp_path, layout, msgspec.structs.replace(config, kv_cache_dtype=kind)) as engine:
            assert engine.generate(prompts(), GREEDY) == truth, f"{layout}, {config}"
            again = [[*prompt, *reply[:-1]] for prompt, reply in zip(prompts(), truth, strict=True)]
            last = msgspec.structs.replace(GREEDY, max_tokens=1)
            assert engine.generate(again, last) == [ids[-1:] for ids in truth], f"{layout}, {config}, after a hit"
            stats = engine.stats()
            assert stats["prefix_hits"] > 0
            assert config is not TIGHT or stats["preemptions"] > 0, "the cache was meant to be too small"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_scores_are_those_of_the_twin_however_a_prompt_is_cut(kind: str, tmp_path: Path) -> None:
    """In float64, where nothing is rounded but the cache's rows: all at once, in chunks, and from pages of before."""
    save_model("gemma2", tmp_path)
    want = RoundedModel(tmp_path, kind).logits(LONG).log_softmax(-1)
    truth = [float(want[place - 1, LONG[place]]) for place in range(1, len(LONG))]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    without = msgspec.structs.replace(params, prompt_logprobs=None)
    for config, layout in ((ROOMY, "pp=1"), (CHUNKED, "pp=1"), (ROOMY, "pp=2,tp=1+2")):
        exact = msgspec.structs.replace(config, dtype="float64", kv_cache_dtype=kind)
        with Engine.load(tmp_path, layout, exact) as engine:
            assert scores(engine, "whole", params) == pytest.approx([*truth, float(want[-1].max())], abs=1e-6)
            assert scores(engine, "first", without) == pytest.approx([float(want[-1].max())], abs=1e-6)
            assert scores(engine, "found", without) == pytest.approx([float(want[-1].max())], abs=1e-6)
            assert engine.stats()["prefix_hits"] > 0
    with Engine.load(tmp_path, "pp=1", msgspec.structs.replace(ROOMY, dtype="float64")) as engine:
        plain = scores(engine, "plain", params)
    assert max(abs(a - b) for a, b in zip(plain, truth, strict=False)) > 1e-3, "codes are to be told from numbers"


def scores(engine: Engine, name: str, params: SamplingParams) -> list[float]:
    """Log-probabilities of the prompt's tokens, where they are asked for, and of the reply's."""
    outputs = list(engine.submit(Request(id=name, prompt_ids=tuple(LONG), params=params)))
    found = [one for output in outputs for one in (*output.prompt_logprobs, *output.logprobs)]
    return [one.logprob for one in found if one]


def test_an_unknown_cache_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'"):
        Engine.load(tmp_path, "pp=1", msgspec.structs.replace(ROOMY, kv_cache_dtype="int4"))
