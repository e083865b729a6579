"""What an adapter's writer says of it, and of which modules it warns, as PEFT will not read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.layouts import spec_of
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.export_adapter import adapter_config, not_read_by_peft

ROOT = Path(__file__).resolve().parents[4]

EXPERT = "model.layers.1.mlp.experts.0.gate_proj"
DENSE, SHARED = "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_expert.gate_proj"
QUERY = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("model_type", "modules", "lost"),
    [
        ("qwen3_moe", [QUERY, DENSE, EXPERT, SHARED], [DENSE, SHARED]),
        ("qwen3_5_moe_text", [QUERY, EXPERT], [EXPERT]),
        ("qwen2_moe", [QUERY, EXPERT, SHARED], [EXPERT]),
        ("gemma4_text", [DENSE, EXPERT], [EXPERT]),
        ("qwen3_moe", [QUERY, EXPERT], []),
        ("llama", [QUERY, DENSE], []),
    ],
)
def test_modules_that_peft_drops_are_named(model_type: str, modules: list[str], lost: list[str]) -> None:
    assert not_read_by_peft(model_type, modules) == lost


@pytest.mark.parametrize(("alpha", "written"), [(32, "32"), (32.0, "32"), (0.5, "0.5")])
def test_a_whole_alpha_is_written_as_peft_writes_it(alpha: float, written: str) -> None:
    """A program may have made the job with a whole number, too."""
    config = adapter_config(LoraJob(lora_alpha=alpha), spec_of(ROOT / "models" / "tiny"), "")
    assert repr(config["lora_alpha"]) == written
