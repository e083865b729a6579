"""Attention whose scores go through memory, operation by operation: seconds against bytes and flops written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from tests.unit.planner.cost.roofline.test_layer_time import BARE, FLAT, LAYERS, pass_seconds
from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.cost.roofline.attention_time import AttentionSeconds, attention_seconds
from tllm.spec.plan import Plan

N, H, LENGTHS = 8, 8, (64, 64)
SCORES = N * sum(n * n for n in LENGTHS)
SLOW = 1e9
"""Bytes per second at which every product takes as long as its bytes."""


def core(scores: Literal["fused", "softmax", "dropout"], bandwidth: float, text: str = "pp=1") -> AttentionSeconds:
    facts = TrainingFacts(64, 8, 2, "bfloat16")
    work = rank_works(SPEC, Plan.parse(text, SPEC.num_layers), facts)[0]
    device = replace(FLAT, memory_bandwidth=bandwidth)
    execution = replace(BARE, scores=scores)
    return attention_seconds(SPEC, SPEC.layers[0], work.cut, work.batch, device, execution, "bfloat16")


def test_with_free_memory_it_is_all_scores_masked_ones_too() -> None:
    found = core("dropout", 1e30)
    assert found.forward == pytest.approx(2 * 2 * SCORES * H / 1e12)
    assert found.backward == pytest.approx(2 * found.forward), "four products for two"
    fused = core("fused", 1e30)
    assert fused.backward == pytest.approx(2.5 * fused.forward)
    assert found.forward / fused.forward == pytest.approx(2 * 64 / 65), "of which the causal mask hides nearly half"


def test_with_slow_memory_it_is_the_bytes_of_each_operation() -> None:
    """Scores of two bytes: a product writes or reads them, softmax 2 times forward and 3 backward, dropout 2 and a mask
    of one byte."""
    products = 2 * (2 * SCORES + 2 * N * sum(2 * n * H for n in LENGTHS))
    for scores, dropped in (("softmax", 0), ("dropout", 5)):
        found = core(scores, SLOW)  # type: ignore[arg-type]
        early, late = SCORES * (4 + dropped), SCORES * (6 + dropped)
        assert found.forward == pytest.approx((products + early) / SLOW)
        assert found.backward == pytest.approx((2 * products + late) / SLOW)
        assert (found.forward_elementwise, found.backward_elementwise) == pytest.approx((early / SLOW, late / SLOW))


def test_ranks_that_share_the_heads_share_the_scores() -> None:
    whole, half = core("dropout", SLOW), core("dropout", SLOW, "tp=2")
    assert half.forward == pytest.approx(whole.forward / 2) and half.backward == pytest.approx(whole.backward / 2)


@pytest.mark.parametrize(("text", "times"), [("pp=1", 0), ("pp=1,recompute=selective", 1), ("pp=1,recompute=layer", 1)])
def test_what_is_recomputed_goes_through_memory_again(text: str, times: int) -> None:
    slow = replace(FLAT, memory_bandwidth=SLOW)
    fused, found = (pass_seconds(slow, replace(BARE, scores=scores), text=text) for scores in ("fused", "dropout"))
    one = core("dropout", SLOW)
    again = times * len(LAYERS)
    assert found.recompute - fused.recompute == pytest.approx(again * (one.forward - core("fused", SLOW).forward))
    elementwise = len(LAYERS) * (one.forward_elementwise + one.backward_elementwise) + again * one.forward_elementwise
    assert found.memory - fused.memory == pytest.approx(elementwise)
