"""Prefix caching changes no token: chats of several turns, over every kind of layer and cut, beside `transformers`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from tests.support.models.families import save_model
from tests.support.selection import EACH_PART, in_turn
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import Request, SamplingParams, TokenLogprobs

REPLY, TURNS = 12, 3
GREEDY = SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True)
ROOMY = EngineConfig(dtype="float32", cache_tokens=1024, page_size=4)
CHUNKED = msgspec.structs.replace(ROOMY, max_num_seqs=4, max_num_batched_tokens=11)
DRAFTED = msgspec.structs.replace(ROOMY, num_speculative_tokens=4)
TIGHT = msgspec.structs.replace(ROOMY, cache_tokens=128, max_num_seqs=4, max_num_batched_tokens=48)

Turn = tuple[list[list[int]], list[list[int]]]
"""The prompts of a turn and their replies."""


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def turns_of(model: transformers.PreTrainedModel) -> list[Turn]:
    """Three chats that begin with the same 17 tokens; each turn goes on from the reply that transformers gave."""
    prompts, turns = [[*random_ids(17, 1), *random_ids(6 + 5 * chat, 10 + chat)] for chat in range(3)], list[Turn]()
    for turn in range(TURNS):
        replies = [greedy(model, prompt) for prompt in prompts]
        turns.append((prompts, replies))
        said = [random_ids(5, 100 * turn + chat) for chat in range(3)]
        prompts = [[*old, *reply, *new] for old, reply, new in zip(prompts, replies, said, strict=True)]
    return turns


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """Without any cache: every token is computed again for each new one."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(REPLY):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


CASES = ("llama", "mistral", "gemma2", "qwen3_moe", "gemma4_e2b")


@EACH_PART
@pytest.mark.parametrize("case", CASES)
def test_chats_go_on_as_transformers_would_compute_them_anew(case: str, part: str, tmp_path: Path) -> None:
    turns = turns_of(save_model(case, tmp_path))
    ways = [(layout, ROOMY) for layout in ("pp=1", "tp=3,shares=1:2:1", "pp=3,layers=1+2+1")]
    ways += [("pp=2,tp=1+2", config) for config in (ROOMY, CHUNKED, DRAFTED, TIGHT)]
    for layout, config in in_turn(ways, case, CASES, part):
        with Engine.load(tmp_path, layout, config) as engine:
            for prompts, replies in turns:
                assert engine.generate(prompts, GREEDY) == replies, f"{layout}, {config}"
            stats = engine.stats()
            asked = sum(len(prompt) for prompts, _ in turns for prompt in prompts)
            assert stats["prefix_queries"] == asked
            if config is TIGHT:
                assert stats["preemptions"] > 0, "the cache was meant to be too small"
                assert stats["prefix_hits"] > 0
            else:
                assert stats["prefix_hits"] > 0.6 * asked


def test_keys_that_depend_on_the_length_are_not_shared(tmp_path: Path) -> None:
    """Dynamic rope: a prompt's keys follow from its length, so the next turn's are others."""
    save_model("llama_dynamic", tmp_path)
    prompts = [random_ids(20, 1), random_ids(20, 1) + random_ids(20, 2)]
    with Engine.load(tmp_path, "pp=2", ROOMY) as engine:
        in_turn = [engine.generate([prompt], GREEDY) for prompt in prompts]
        assert not engine.limits.enable_prefix_caching and "prefix_hits" not in engine.stats()
    with Engine.load(tmp_path, "pp=2", ROOMY) as engine:
        assert engine.generate([prompts[1]], GREEDY) == in_turn[1]


def test_scores_after_a_hit_are_those_without_one(tmp_path: Path) -> None:
    """In float64 what is found differs from what would be computed by no more than rounding."""
    save_model("gemma2", tmp_path)
    config = msgspec.structs.replace(ROOMY, dtype="float64")
    params = msgspec.structs.replace(GREEDY, logprobs=4)
    asked = [Request(id=name, prompt_ids=tuple(random_ids(41, 3)), params=params) for name in ("first", "second")]
    for layout in ("pp=1", "pp=2,tp=1+2"):
        with Engine.load(tmp_path, layout, config) as engine:
            (first, none), (second, found) = (scored(engine, one) for one in asked)
        assert (none, found) == (0, 40)
        assert second == pytest.approx(first, abs=1e-12)


def scored(engine: Engine, request: Request) -> tuple[list[float], int]:
    """All log-probabilities of a reply, and how many tokens of the prompt were found."""
    outputs = list(engine.submit(request))
    scores: list[TokenLogprobs] = [one for output in outputs for one in output.logprobs]
    return [value for one in scores for _, value in ((0, one.logprob), *one.top)], outputs[0].cached_tokens
