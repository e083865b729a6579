"""The benchmark of what security costs, with a tiny model: both ways give the same tokens, at rates that are told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.comm import wire_cost as bench
from benchmarks.models import random_llama as shapes
from tllm.spec.request import Output


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_guarded_and_bare_ranks_have_the_same_tokens(plan: str, tmp_path: Path) -> None:
    found = bench.compare(shapes.model_folder("tiny", tmp_path), plan, argparse.Namespace(tokens=8, turns=2))
    assert {way: len(rates) for way, rates in found.items()} == {bench.GUARDED: 2, bench.BARE: 2}
    assert all(rate > 0 for rates in found.values() for rate in rates)
    assert "tiny" in bench.table([{"size": "tiny", "plan": plan, "link": "loopback", **found}])


def test_the_rate_is_of_tokens_alone() -> None:
    """Before the first of them comes how much of the prompt is computed, which took as long as twenty tokens."""
    came = [(0.0, Output(request_id="r", computed_tokens=64))]
    came += [(10.0 + 0.5 * n, Output(request_id="r", token_ids=(n,))) for n in range(5)]
    assert bench.figures(came) == {"rate": 2.0, "ids": [0, 1, 2, 3, 4]}
