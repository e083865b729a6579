"""Models whose weights are rounded while they load: what layouts share, and how far the answers are from exact ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.few_bits import libraries
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.kernels import row_operations
from tllm.kernels.library import Library
from tllm.parallel import quantized_weight
from tllm.spec.quantized.weight_form import Quantize
from tllm.spec.request import Request, SamplingParams

CONFIG = EngineConfig(dtype="float32", cache_tokens=1024, max_num_seqs=8)
SCORED = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
FAMILIES = ("llama", "gemma2", "qwen2_moe")
SIZES = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=256)
"""Heads and widths of whole groups of 32, so that ranks round the activations of the same columns together."""

PROMPT = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(7)).tolist()
KINDS: tuple[Quantize, ...] = ("int8", "int4")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path, **SIZES)
    return path


def scored(folder: Path, layout: str, config: EngineConfig) -> tuple[list[int], list[float]]:
    """The ids of a reply, and the log-probabilities of the prompt's tokens and of these."""
    with Engine.load(folder, layout, config) as engine:
        outputs = list(engine.submit(Request(id="one", prompt_ids=tuple(PROMPT), params=SCORED)))
    ids = [token for out in outputs for token in out.token_ids]
    found = [one for out in outputs for one in (*out.prompt_logprobs, *out.logprobs)]
    return ids, [one.logprob for one in found if one]


def distance(some: list[float], others: list[float]) -> float:
    """Root mean square of the differences of log-probabilities."""
    return float((torch.tensor(some) - torch.tensor(others)).square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_answers_alike(folder: Path, kind: Quantize) -> None:
    """To the bit, however stages and ranks are cut.

    The sum over experts is rounded, which can move an activation's code to the next one: then answers are near.
    """
    config = msgspec.structs.replace(CONFIG, quantize=kind)
    ids, chances = scored(folder, "pp=1", config)
    assert scored(folder, "pp=3,layers=1+2+1", config) == (ids, chances)
    for layout in ("tp=2", "pp=2,tp=2", "tp=3,shares=1:2:1"):
        found, near = scored(folder, layout, config)
        if "moe" in folder.name:
            prompt = len(PROMPT) - 1
            assert distance(near[:prompt], chances[:prompt]) < 0.1, layout
        else:
            assert (found, near) == (ids, chances), layout


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_rounded_weights(folder: Path, kind: Quantize) -> None:
    """Held as plain numbers in float64: what differs is the rounding of activations to 8 bits."""
    config = msgspec.structs.replace(CONFIG, quantize=kind)
    _, chances = scored(folder, "pp=1", config)
    exact = msgspec.structs.replace(config, dequantize=True, dtype="float64")
    _, wanted = scored(folder, "pp=1", exact)
    prompt = len(PROMPT) - 1  # of the reply, tokens may differ
    assert distance(chances[:prompt], wanted[:prompt]) < 0.05
    _, plain = scored(folder, "pp=1", msgspec.structs.replace(CONFIG, dtype="float64"))
    rounding = distance(plain[:prompt], wanted[:prompt])
    assert (0.005 if kind == "int8" else 0.1) < rounding < (0.1 if kind == "int8" else 0.8), "weights are rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_answers_with_the_same_bits(
    folder: Path, kind: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply, its log-probabilities and those of its prompt."""
    config = msgspec.structs.replace(CONFIG, quantize=kind)

    def answers(library: Library) -> tuple[list[int], list[float]]:
        monkeypatch.setattr(quantized_weight, "library", lambda: library)
        monkeypatch.setattr(row_operations, "library", lambda: library)
        return scored(folder, "pp=1", config)

    first, *others = [answers(library) for library in libraries()]
    assert others and all(other == first for other in others)


@pytest.mark.parametrize("folder", ["llama", "gemma2"], indirect=True)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_answers_have_the_same_bits_however_they_come_about(folder: Path, kv_cache_dtype: str) -> None:
    """Prompts whole or in pieces, computed or found in the cache, alone or beside others, begun again, with drafts.

    Not where there are experts: their router's product is torch's, whose bits depend on the number of rows.
    """
    config = msgspec.structs.replace(CONFIG, quantize="int4", page_size=4, kv_cache_dtype=kv_cache_dtype)
    reply = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
    prompts = [PROMPT[:count] * 2 for count in (40, 33, 25, 17)]

    def answers(config: EngineConfig, layout: str, turns: int = 1) -> tuple[list[object], dict[str, float]]:
        with Engine.load(folder, layout, config) as engine:
            for turn in range(turns):
                asked = [Request(id=f"{turn} {i}", prompt_ids=tuple(p), params=reply) for i, p in enumerate(prompts)]
                streams = [engine.submit(request) for request in asked]
                found = [[(out.token_ids, out.logprobs) for out in stream] for stream in streams]
            tokens = [[token for ids, _ in one for token in ids] for one in found]
            scores = [[score for _, some in one for score in some] for one in found]
            return [tokens, scores], engine.stats()

    alone, _ = answers(msgspec.structs.replace(config, max_num_seqs=1, enable_prefix_caching=False), "pp=1")
    pieces, _ = answers(msgspec.structs.replace(config, max_num_seqs=4, max_num_batched_tokens=11), "pp=1")
    assert pieces == alone
    found, stats = answers(config, "tp=2", turns=2)
    assert found == alone and stats["prefix_hits"] > 100
    tight = msgspec.structs.replace(config, cache_tokens=160, max_num_seqs=4, max_num_batched_tokens=48)
    anew, stats = answers(tight, "pp=2")
    assert anew == alone and stats["preemptions"] > 0, "the cache was meant to be too small"
    drafted, stats = answers(msgspec.structs.replace(config, num_speculative_tokens=4), "pp=1")
    assert drafted == alone and stats["draft_tokens"] > 0


def test_weights_are_rounded_alike_wherever_they_are_cut(folder: Path) -> None:
    """As plain numbers: the rounding itself does not depend on the cut."""
    config = msgspec.structs.replace(CONFIG, quantize="int4", dequantize=True, dtype="float64")
    ids, chances = scored(folder, "pp=1", config)
    found, near = scored(folder, "tp=3,shares=1:2:1", config)
    assert found == ids and near == pytest.approx(chances, abs=1e-10)
