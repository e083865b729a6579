"""The engine on devices with memory of their own writes what it writes on the processor, for each family and plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.device.separate_device import SEPARATE
from tests.support.models.families import FAMILIES, save_model
from tests.support.serving.followed_layers import overlap
from tllm.devices.choose import CPU
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import Request, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=5, ignore_eos=True)
SHORT = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAMPLED_SHORT = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, top_k=30, seed=6, ignore_eos=True)
CHUNKED = EngineConfig(dtype="float32", cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=11)
TIGHT = EngineConfig(dtype="float32", cache_tokens=80, page_size=4, max_num_seqs=4, max_num_batched_tokens=48)
DRAFTED = EngineConfig(dtype="float32", cache_tokens=512, num_speculative_tokens=4)
KINDS = ("llama", "gemma2", "gpt_oss_moe", "deepseek_v3_moe", "qwen3_next_moe", "gemma4_e2b")
"""Of each kind of layer one."""


def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(3, 101, (length,), generator=chance).tolist() for length in (3, 17, 29)]


def written(engine: Engine, params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    """Of each prompt the new ids, and their log-probabilities."""
    asked = [Request(id=f"{n}", prompt_ids=tuple(ids), params=params) for n, ids in enumerate(prompts())]
    found = []
    for stream in [engine.submit(request) for request in asked]:
        outputs = list(stream)
        ids = [token for output in outputs for token in output.token_ids]
        found.append((ids, [one.logprob for output in outputs for one in output.logprobs or () if one is not None]))
    return found


def assert_alike(got: list[tuple[list[int], list[float]]], want: list[tuple[list[int], list[float]]]) -> None:
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    for (_, ours), (_, theirs) in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5), "float32 rounds otherwise where steps are not fused"


@pytest.mark.parametrize("case", FAMILIES)
def test_a_family(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    with Engine.load(tmp_path, "pp=1", CHUNKED) as engine:
        want = written(engine, GREEDY)
    with Engine.load(tmp_path, "pp=1", CHUNKED, devices=SEPARATE) as engine:
        assert_alike(written(engine, GREEDY), want)


@pytest.mark.parametrize("case", KINDS)
def test_plans_over_devices_and_processors(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    with Engine.load(tmp_path, "pp=1", TIGHT) as engine:
        want = written(engine, GREEDY), written(engine, SAMPLED)
    for plan, sizes, devices in [
        ("pp=1", TIGHT, SEPARATE),
        ("pp=1", DRAFTED, SEPARATE),
        ("pp=2", TIGHT, (SEPARATE[0], CPU)),
        ("pp=2,tp=1+2", CHUNKED, (CPU, *SEPARATE)),
        ("tp=2", TIGHT, SEPARATE),
    ]:
        with Engine.load(tmp_path, plan, sizes, devices=devices) as engine:
            assert_alike(written(engine, GREEDY), want[0])
            assert_alike(written(engine, SAMPLED), want[1])
            if sizes is TIGHT:
                assert engine.stats()["preemptions"] > 0, "the cache was meant to be too small"


@pytest.mark.parametrize("params", [SHORT, SAMPLED_SHORT])
def test_steps_that_a_device_begins_before_the_host_knows_the_tokens(params: SamplingParams, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with Engine.load(tmp_path, "pp=1", TIGHT) as engine:
        want = written(engine, params)
    with Engine.load(tmp_path, "pp=1", TIGHT, devices=SEPARATE) as engine:
        layers = overlap(engine.driver)
        assert_alike(written(engine, params), want)
        assert layers.batches > 5 and engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("coding", ["int8", "fp8"])
def test_a_cache_of_codes_and_pages_on_disk(coding: str, tmp_path: Path) -> None:
    """In float64: in float32 a key may lie so near to the middle between two codes that rounding decides."""
    save_model("llama", tmp_path / "model")
    made = []
    for devices in ((CPU,), SEPARATE):
        folder = tmp_path / devices[0].type
        sizes = EngineConfig(
            dtype="float64",
            cache_tokens=96,
            page_size=4,
            kv_cache_dtype=coding,
            cache_dir=str(folder),
            cache_dir_size=1 << 24,
        )
        with Engine.load(tmp_path / "model", "pp=1", sizes, devices=devices) as engine:
            first = written(engine, GREEDY)
        with Engine.load(tmp_path / "model", "pp=1", sizes, devices=devices) as engine:
            again = written(engine, GREEDY)
            assert engine.stats()["external_prefix_hits"] > 0
        assert_alike(again, first)
        made.append(first)
    assert_alike(made[1], made[0])
