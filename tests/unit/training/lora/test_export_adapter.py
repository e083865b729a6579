"""Of which modules an adapter's writer warns, as PEFT will not read them."""

from __future__ import annotations

import pytest

from tllm.training.lora.export_adapter import not_read_by_peft

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
