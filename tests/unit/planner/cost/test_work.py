"""What a worker takes beside weights and cache."""

from __future__ import annotations

from tllm.planner.cost.cache_room import working_bytes
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan

SPEC = spec_from_config(
    dict(
        model_type="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        rms_norm_eps=1e-6,
    )
)


def work(plan: str, rank: int, dtype: str = "bfloat16", tokens: int = 100) -> int:
    return working_bytes(SPEC, rank_bytes(SPEC, Plan.parse(plan, 2), dtype)[rank], dtype, tokens, sequences=8)


def test_activations_follow_tokens_and_width() -> None:
    assert work("pp=2", 0) == 100 * (2 * 4 * (64 + 96) + 8 * 64)
    assert work("pp=2", 0, "float32") == 100 * 4 * 4 * (64 + 96)
    assert work("pp=2", 0, tokens=200) == 2 * work("pp=2", 0)


def test_only_the_last_stage_makes_logits() -> None:
    assert work("pp=2", 1) - work("pp=2", 0) == 2 * 4 * 8 * 1000


def test_a_cut_rank_works_on_its_part() -> None:
    assert work("tp=2", 0) < work("pp=1", 0)
