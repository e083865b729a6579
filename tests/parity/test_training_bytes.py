"""A rank of a training plan takes the memory that the planner says: weights, gradients, states, what a step adds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.families import save_model
from tests.support.layouts import in_threads, spec_of
from tests.support.memory import Live
from tests.support.plans import full_rows, plan_of
from tests.support.training import Layout, Rank, close, ranks_of
from tllm.planner.ranks import TrainingFacts
from tllm.planner.training import RankMemory, training_bytes
from tllm.train.optimizer import SGD, AdamW

TOKENS, COUNT = 90, 4
TP2, TP3 = ((1, 1),), ((1, 2, 1),)

LAYOUTS = (
    Layout(recompute="layer"),
    Layout(2, "1f1b"),
    Layout(2, "1f1b", layers=(1, 3), recompute="selective"),
    Layout(2, "zero_bubble"),
    Layout(2, "zero_bubble", recompute="layer"),
    Layout(2, "interleaved", chunks=2),
    Layout(dp=(1, 1), zero=1),
    Layout(dp=(1, 1), zero=2),
    Layout(dp=(1, 1), zero=3),
    Layout(shares=TP3),
    Layout(shares=TP2, sequence=True),
)


def watch(rank: Rank) -> list[int]:
    """The most memory of weights, in a list that follows it."""
    most, take = [rank.update.runs.nbytes], rank.update.runs.take

    def taking(number: int) -> None:
        take(number)
        most[0] = max(most[0], rank.update.runs.nbytes)

    rank.update.runs.take = taking  # type: ignore[method-assign]
    return most


def peak(rank: Rank) -> int:
    """What the second pass takes at most beside all that is there since the first."""
    with Live() as live:
        rank.gradients(full_rows(COUNT, TOKENS))
        return live.peak


def check(rank: Rank, weights: int, step: int, planned: RankMemory, zero: int) -> None:
    assert weights == pytest.approx(planned.weights, rel=0.1 if zero == 3 else 0.001)
    between = rank.buckets.nbytes * (1 + rank.groups.dp.size if zero > 1 else 1)
    assert between == pytest.approx(planned.gradients, rel=0.01)
    assert rank.update.nbytes == pytest.approx(planned.optimizer + planned.wide_weights, rel=0.01)
    assert step == pytest.approx(planned.activations + planned.logits + planned.working, rel=0.12)


@pytest.mark.parametrize(
    ("case", "dtype", "layouts"),
    [
        ("llama", torch.float32, LAYOUTS),
        ("gemma2", torch.bfloat16, LAYOUTS[:5:2]),
        ("olmo2", torch.float64, LAYOUTS[1::4]),
        ("qwen2_moe", torch.bfloat16, LAYOUTS[::4]),
    ],
)
def test_a_rank_takes_what_is_planned(case: str, dtype: torch.dtype, layouts: Sequence[Layout], tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_of(tmp_path)
    for layout in layouts:
        plan, optimizer = plan_of(layout, spec.num_layers), SGD() if layout.zero == 1 else AdamW()
        name, states = str(dtype).removeprefix("torch."), len(optimizer.states)
        facts = TrainingFacts(TOKENS, COUNT, dtype=name, states=states, bucket_bytes=4096)
        ranks = ranks_of(tmp_path, layout, dtype, optimizer)
        most = [watch(rank) for rank in ranks]
        in_threads([partial(rank.step, 1, full_rows(COUNT, TOKENS), 1e-3) for rank in ranks])
        peaks = in_threads([partial(peak, rank) for rank in ranks])
        for rank, (weights,), step, planned in zip(ranks, most, peaks, training_bytes(spec, plan, facts), strict=True):
            check(rank, weights, step, planned, layout.zero)
        close(ranks)


def test_what_is_not_in_memory_is_not_in_the_total(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    plan = plan_of(Layout(), spec.num_layers)
    facts = TrainingFacts(64, 4, dtype="bfloat16")
    (here,) = training_bytes(spec, plan, facts)
    (there,) = training_bytes(spec, msgspec.structs.replace(plan, offload="disk"), facts)
    assert there.on_disk == here.optimizer + here.wide_weights == here.weights * 6
    assert here.total - there.total == there.on_disk
