"""What an engine says of tokens that it samples is what a trainer finds, under unlike plans; to the bit where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import TRAINABLE, save_model
from tests.support.selection import soak_but
from tests.support.training.post_training.unlike_plans import (
    ToldScheduler,
    job_of,
    sampled_rows,
    starve,
    told,
    trained,
)

PLANS = (
    ("pp=1", "cp=2"),
    ("pp=2", "dp=3"),
    ("tp=2", "pp=2"),
    ("pp=2,tp=1+2", "tp=3,sequence=false"),
    ("pp=1", "dp=2,tp=2"),
    ("tp=2", "dp=2,cp=2"),
)
"""Of the engine, and of the trainer."""
OF_EXPERTS = (("pp=1", "dp=2,ep=2"), ("tp=2", "dp=2,ep=2"))

KEPT = (
    "llama-pp=1-cp=2",
    "qwen3-pp=2-dp=3",
    "gemma3-tp=2-pp=2",
    "gpt_oss_moe-tp=2-dp=2,ep=2",
    "qwen3_5-pp=1-dp=2,tp=2",
)
"""What `make test` has."""
WITH_EXPERTS = [case for case in TRAINABLE if case.endswith("_moe") or case in ("mixtral", "qwen3_moe_dense_layer")]
WITH_STATES = ("qwen3_next_moe", "qwen3_5", "qwen3_5_moe")
"""A state goes from token to token, so that `check_trainable` refuses cp."""
CASES = {
    f"{family}-{engine}-{trainer}": (family, engine, trainer)
    for family in TRAINABLE
    for engine, trainer in (*PLANS, *(OF_EXPERTS if family in WITH_EXPERTS else ()))
    if "cp=" not in trainer or family not in WITH_STATES
}

EXACT = ("llama_dynamic", "gemma2", "gpt_oss_moe", "deepseek_v3_moe", "qwen3_5", "olmo2", "glm4_moe")
WIDE: dict[str, dict[str, Any]] = {
    **{family: dict(head_dim=16, global_head_dim=16) for family in ("gemma4", "gemma4_moe")},
    **{family: dict(kv_lora_rank=28) for family in ("glm4_moe_lite", "deepseek_v2_moe", "deepseek_v3_moe")},
    "gemma4_unified": dict(head_dim=16, global_head_dim=32),
}
"""Heads of whole sixteens, where it is not `head_dim` alone that says so."""


def save_wide(family: str, folder: Path) -> None:
    save_model(family, folder, **WIDE.get(family, dict(head_dim=16)))


@pytest.mark.parametrize("name", soak_but(KEPT, CASES))
def test_a_trainer_of_another_plan_finds_what_the_engine_said(name: str, tmp_path: Path) -> None:
    """To 1e-12 in float64; in float32 to 1e-6 of the largest, and on average absolutely."""
    family, engine, trainer = CASES[name]
    save_model(family, tmp_path)
    for dtype, temperature in (("float64", 0.7), ("float32", 1.0)):
        job = job_of(tmp_path, dtype, temperature=temperature)
        rows = sampled_rows(engine, job)
        told_L, found_L = told(rows), trained(trainer, job, rows)
        off_L = (told_L - found_L).abs()
        assert len(told_L) == 12 * 24 and float(told_L.std()) > 0.1
        if dtype == "float64":
            assert float(off_L.max()) < 1e-12
        else:
            assert float(off_L.max() / told_L.abs().max()) < 1e-6 and float(off_L.mean()) < 1e-6


@pytest.mark.parametrize("family", soak_but(EXACT, TRAINABLE))
def test_in_every_family_they_are_equal_to_the_bit(family: str, tmp_path: Path) -> None:
    """A token at a time in the engine, all completions together in the trainer."""
    save_wide(family, tmp_path)
    for dtype in ("float32", "bfloat16") if family in ("llama", "gpt_oss_moe", "qwen3_5") else ("float32",):
        job = job_of(tmp_path, dtype, deterministic=True, temperature=1.3)
        rows = sampled_rows("pp=1", job)
        assert torch.equal(told(rows), trained("pp=1", job, rows, packed=12))


@pytest.mark.parametrize(("engine", "trainer", "packed"), [("pp=2", "dp=4", 1), ("pp=1", "pp=4", 5)])
def test_plans_that_are_unlike_do_not_change_a_bit(engine: str, trainer: str, packed: int, tmp_path: Path) -> None:
    save_wide("qwen3", tmp_path)
    job = job_of(tmp_path, "float32", deterministic=True, temperature=0.7)
    rows = sampled_rows(engine, job)
    assert torch.equal(told(rows), trained(trainer, job, rows, packed))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.soak)])
def test_neither_do_cut_prompts_preempted_completions_and_cached_prefixes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_wide(family, tmp_path)
    job = job_of(tmp_path, "float32", deterministic=True)
    plenty = told(sampled_rows("pp=1", job))
    starve(monkeypatch, num_pages=14, max_num_seqs=8, max_num_batched_tokens=13)
    rows = sampled_rows("pp=1", job)
    assert ToldScheduler.met["preempted"] > 0
    assert ToldScheduler.met["cached"] > 0 or family == "qwen3_5", "pages have no states, so those are not shared"
    assert torch.equal(told(rows), plenty)
    assert torch.equal(told(rows), trained("pp=1", job, rows))


def test_without_being_asked_for_they_are_not(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    save_wide("llama", tmp_path)
    job = job_of(tmp_path, "float32")
    rows = sampled_rows("pp=1", job)
    assert not torch.equal(told(rows), trained("pp=1", job, rows))
