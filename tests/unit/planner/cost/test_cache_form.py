"""A cache in one byte each: what the planner counts of it in bytes and in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tllm.core.errors import ConfigError
from tllm.engine.schedule.limits import EngineConfig, limits_of
from tllm.planner.cluster.device import Cluster, Device
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts
from tllm.planner.cost.stage_team import StageTeam
from tllm.spec.cut import cut_stage
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.quantized.cache_form import cached_bytes

SPEC = spec_from_config(
    dict(
        model_type="llama",
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
    )
)
PLAN = Plan.parse("pp=1", 2)
NUMBERS, ROWS = 2 * 2 * 2 * 64, 2 * 2 * 2
"""Of one token: layers, kv heads, key and value, and the numbers of each."""


def test_a_byte_for_each_number_and_a_scale_for_each_row() -> None:
    assert cached_bytes(128, 2, 2, "auto") == 256
    assert cached_bytes(128, 2, 2, "int8") == cached_bytes(128, 2, 4, "fp8") == 128 + 2 * 4
    for dtype, kind, want in (
        ("bfloat16", "auto", 2 * NUMBERS),
        ("bfloat16", "int8", NUMBERS + 4 * ROWS),
        ("float32", "fp8_e4m3", NUMBERS + 4 * ROWS),
    ):
        (rank,) = rank_bytes(SPEC, PLAN, dtype, kind)
        assert rank.kv_per_token == want


def test_the_same_bytes_hold_more_pages() -> None:
    budget = 100 * 16 * 2 * NUMBERS
    plain, coded = (
        limits_of(SPEC, PLAN, EngineConfig(dtype="bfloat16", cache_bytes=budget, kv_cache_dtype=kind)).num_pages
        for kind in ("auto", "int8")
    )
    assert (plain, coded) == (100, 100 * 128 // 68)


def test_a_team_holds_and_reads_fewer_bytes() -> None:
    """On a device that is bound by reading."""
    device = Device(2**30, (("bfloat16", ((1, 1e15),)),), 1e6)
    cluster = Cluster(("a",), (device,), (0,), (None,))
    facts = ServingFacts("bfloat16", 4096, 128)
    plain, coded = (
        StageTeam(SPEC, cluster, [0], cut_stage(SPEC, (1,)), replace(facts, kv_cache_dtype=kind))
        for kind in ("auto", "int8")
    )
    bytes_of = [team.memory(range(2))[0].cache for team in (plain, coded)]
    assert bytes_of == [facts.cached_tokens * 2 * NUMBERS, facts.cached_tokens * (NUMBERS + 4 * ROWS)]
    batch = _decode(4096)
    saved = sum(plain.layer_time(layer, batch).memory - coded.layer_time(layer, batch).memory for layer in SPEC.layers)
    assert saved == pytest.approx(4096 * (NUMBERS - 4 * ROWS) / 1e6)


def _decode(keys: float) -> ExpectedBatch:
    return ExpectedBatch(1, 1, keys, 1)


def test_an_unknown_cache_is_refused_before_anything_is_counted() -> None:
    for refused in (
        lambda: ServingFacts("bfloat16", kv_cache_dtype="fp4"),
        lambda: rank_bytes(SPEC, PLAN, "bfloat16", "fp4"),
        lambda: limits_of(SPEC, PLAN, EngineConfig(cache_tokens=64, kv_cache_dtype="fp4")),
    ):
        with pytest.raises(ConfigError, match="'fp4', and a cache is one of 4 kinds"):
            refused()
