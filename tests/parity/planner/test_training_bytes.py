"""A rank of a training plan takes the memory that the planner says: weights, gradients, states, what a step adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads, spec_of
from tests.support.models.live_tensors import Live
from tests.support.selection import EACH_PART, in_turn
from tests.support.training.plans import full_rows, plan_of
from tests.support.training.training_step import Layout, Rank, close, ranks_of
from tllm.comm.collectives.group import solo
from tllm.comm.links.link import LocalLink
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.memory.training_memory import RankMemory, training_bytes
from tllm.training.checkpoint.shard_assignment import HeldBox, assign_shards
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.job.job import Job
from tllm.training.job.job_parts import training_facts
from tllm.training.optim.optimizer import SGD, AdamW
from tllm.training.sync.diloco import DiLoCo
from tllm.weights.boxes import widths

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


@pytest.fixture(autouse=True)
def messages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next one is sent. Whether a message was taken before its sender's peak is chance; there must be room
    where it was not."""
    put, last = LocalLink._put, dict[int, object]()

    def putting(link: LocalLink, message: torch.Tensor | bytes, size: int) -> None:
        last[id(link)] = message
        put(link, message, size)

    monkeypatch.setattr(LocalLink, "_put", putting)


def watch(rank: Rank) -> list[int]:
    """The most memory of weights, in a list that follows it."""
    most, take = [rank.update.flat.nbytes], rank.update.flat.allocate

    def taking(number: int) -> None:
        take(number)
        most[0] = max(most[0], rank.update.flat.nbytes)

    rank.update.flat.allocate = taking  # type: ignore[method-assign]
    return most


def peak(rank: Rank, count: int = COUNT, tokens: int = TOKENS) -> int:
    """What the second pass takes at most beside all that is there since the first."""
    with Live() as live:
        rank.gradients(full_rows(count, tokens))
        return live.peak


def check(rank: Rank, weights: int, step: int, planned: RankMemory, zero: int) -> None:
    assert weights == pytest.approx(planned.weights, rel=0.1 if zero == 3 else 0.001)
    between = rank.buckets.nbytes * (1 + rank.groups.dp.size if zero > 1 else 1)
    assert between == pytest.approx(planned.gradients, rel=0.01)
    assert rank.update.nbytes == pytest.approx(planned.optimizer + planned.wide_weights, rel=0.01)
    made = planned.activations + planned.logits + planned.working + planned.waiting_sums
    assert step == pytest.approx(made, rel=0.12)


def saved(ranks: Sequence[Rank]) -> list[int]:
    """Bytes that each rank writes of a save, and copies before."""
    blocks = [rank.update.blocks() for rank in ranks]
    held = [[HeldBox(b.name, b.box, str(b.tensor.dtype), b.tensor.itemsize) for b in some] for some in blocks]
    return [
        sum(math.prod(widths(share.box)) * some[share.block].itemsize for share in shares)
        for some, shares in zip(held, assign_shards(held), strict=True)
    ]


CASES: dict[str, tuple[torch.dtype, tuple[Layout, ...]]] = {
    "llama": (torch.float32, LAYOUTS),
    "gemma2": (torch.bfloat16, LAYOUTS[:5:2]),
    "olmo2": (torch.float64, LAYOUTS[1::4]),
    "qwen2_moe": (torch.bfloat16, LAYOUTS[::4]),
}


@EACH_PART
@pytest.mark.parametrize("case", CASES)
def test_a_rank_takes_what_is_planned(case: str, part: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_of(tmp_path)
    dtype, layouts = CASES[case]
    for layout in in_turn(layouts, case, CASES, part, count=len(LAYOUTS) if case == "llama" else 1):
        plan, optimizer = plan_of(layout, spec.num_layers), SGD() if layout.zero == 1 else AdamW()
        name, states = str(dtype).removeprefix("torch."), len(optimizer.states)
        facts = TrainingFacts(TOKENS, COUNT, dtype=name, states=states, bucket_bytes=4096)
        ranks = ranks_of(tmp_path, layout, dtype, optimizer)
        most = [watch(rank) for rank in ranks]
        in_threads([partial(rank.step, 1, full_rows(COUNT, TOKENS), 1e-3) for rank in ranks])
        peaks = in_threads([partial(peak, rank) for rank in ranks])
        plans = training_bytes(spec, plan, facts)
        for rank, (weights,), step, planned in zip(ranks, most, peaks, plans, strict=True):
            check(rank, weights, step, planned, layout.zero)
        for written, planned in zip(saved(ranks), plans, strict=True):
            assert 0.5 * planned.saving <= written <= 1.001 * planned.saving
        close(ranks)


@pytest.mark.parametrize(
    ("layout", "count", "levels"),
    [
        (Layout(order="1f1b", deterministic=True), 5, 0),
        (Layout(order="1f1b", deterministic=True), 4, 1),
        (Layout(order="1f1b", deterministic=True), 12, 2),
        (Layout(2, "1f1b", deterministic=True), 8, 2),
        (Layout(1, "1f1b", dp=(1, 1), zero=1, deterministic=True), 12, 1),
    ],
)
def test_sums_that_wait_in_the_tree_are_planned(layout: Layout, count: int, levels: int, tmp_path: Path) -> None:
    """Rows are short here and few are under way, so that sums of gradients are most of what a step adds."""
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    facts = TrainingFacts(16, count, bucket_bytes=4096, deterministic=True)
    ranks = ranks_of(tmp_path, layout, torch.float32)
    in_threads([partial(rank.step, 1, full_rows(count, 16), 1e-3) for rank in ranks])
    peaks = in_threads([partial(peak, rank, count, 16) for rank in ranks])
    for rank, step, planned in zip(
        ranks, peaks, training_bytes(spec, plan_of(layout, spec.num_layers), facts), strict=True
    ):
        check(rank, rank.update.flat.nbytes, step, planned, layout.zero)
        size = 4 * sum(bucket.size for bucket in rank.buckets.layout.buckets)
        assert levels * size <= planned.waiting_sums <= levels * size + 2 * facts.bucket_bytes
    close(ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_anchor_and_outer_momentum_are_planned(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    layout = Layout(dp=(1, 1))
    ranks = ranks_of(tmp_path, Layout(), dtype)
    name = str(dtype).removeprefix("torch.")
    job, plain = (
        Job("out", ("rows",), 4, model_name_or_path="model", dtype=name, local_steps=steps) for steps in (4, 1)
    )
    (planned, _) = training_bytes(spec, plan_of(layout, spec.num_layers), training_facts(job))
    local = DiLoCo(ranks[0].update, GradientGroups(solo()), local_steps=4)
    assert planned.outer == local.nbytes > 0
    (without, _) = training_bytes(spec, plan_of(layout, spec.num_layers), training_facts(plain))
    assert without.outer == 0 < planned.saving - without.saving
    assert planned.total - without.total == planned.outer + planned.saving - without.saving
    close(ranks)


def test_what_is_not_in_memory_is_not_in_the_total(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    plan = plan_of(Layout(), spec.num_layers)
    facts = TrainingFacts(64, 4, dtype="bfloat16")
    (here,) = training_bytes(spec, plan, facts)
    (there,) = training_bytes(spec, msgspec.structs.replace(plan, offload="disk"), facts)
    assert there.on_disk == here.optimizer + here.wide_weights == here.weights * 6
    updated = there.buffers - here.buffers  # the states of a bucket, for as long as it is updated
    assert updated == there.on_disk, "as all that there is fits one"
    assert there.saving == 0 < here.saving
    assert here.total - there.total == there.on_disk - updated + here.saving
