"""What was measured on a machine changes no bit of a model of few bits, or of a cache of codes: nothing there asks,
but for ways that have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tllm.engine import decode_recordings
from tllm.engine.compute import attention_choice
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.kernels import float_product
from tllm.kernels.autotune import Autotuned
from tllm.spec.request import SamplingParams

SHAPE = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=256)
PROMPTS = [tuple(range(1, 40)), (5, 6, 7)]
SAME_BITS = {"product of few bits"}
"""Tiles or vectors, of a processor that has both: `tests/unit/kernels/test_quantized_matmul.py` holds them equal."""

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The areas of which a choice is asked for; products with small weights ask too."""
    areas: list[str] = []
    choose = Autotuned.choose

    def watched(self: Autotuned, *arguments: object) -> object:  # type: ignore[type-arg]
        areas.append(self.area)
        return choose(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Autotuned, "choose", watched)
    monkeypatch.setattr(float_product, "MEASURED_BYTES", 0)
    monkeypatch.setattr(decode_recordings, "CACHED_BYTES", 0)
    for module in (float_product, attention_choice, decode_recordings):
        monkeypatch.setattr(module.choices, "known", {})
    return areas


@pytest.mark.parametrize(
    ("config", "areas"),
    [
        (EngineConfig(dtype="float32", quantize="int4"), set()),
        (EngineConfig(dtype="float32", kv_cache_dtype="int8"), {"product", "layers of replies"}),
        (EngineConfig(dtype="float32"), {"product", "layers of replies", "attention of prompts"}),
    ],
    ids=["few bits", "a cache of codes", "plain"],
)
def test_who_asks(config: EngineConfig, areas: set[str], asked: list[str], tmp_path: Path) -> None:
    save_model("llama", tmp_path, **SHAPE)
    with Engine.load(tmp_path, "tp=2", config) as engine:
        engine.generate(PROMPTS, GREEDY)
    assert set(asked) - SAME_BITS == areas
