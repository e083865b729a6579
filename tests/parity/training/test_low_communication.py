"""Sums that lose something, local steps and late sums under every kind of layout: what is held twice stays alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models.families import save_model
from tests.support.models.layouts import in_threads
from tests.support.models.slow_load import slices
from tests.support.selection import covering, soak_but
from tests.support.training.training_step import (
    Layout,
    Named,
    Rank,
    close,
    dealt,
    furthest,
    gather,
    random_tokens,
    ranks_of,
    saved,
    train_under,
)
from tllm.comm.collectives.group import local_groups
from tllm.parallel.shard import shard_of
from tllm.spec.plan import Zero
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.compressed_reduction import Bf16Reduction, Int8Reduction
from tllm.training.gradients.delayed_reduction import DelayedReduction
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.powersgd import PowerSGD
from tllm.training.gradients.reduction import Exact, GradientGroups, Reduction
from tllm.training.optim.optimizer import SGD, AdamW, Optimizer
from tllm.training.sync.diloco import DiLoCo

WAYS: dict[str, Callable[[GradientBuckets], Reduction]] = {
    "bf16": lambda buckets: Bf16Reduction(),
    "int8": Int8Reduction,
    "powersgd": lambda buckets: PowerSGD(buckets, 2),
}
TP2 = ((1, 1),)
CUT = Layout(2, "1f1b", shares=((1, 1), (2, 1, 1)), dp=(1, 2))


def whole_and_alike(ranks: list[Rank], shapes: Named) -> Named:
    """The weights by name, where every rank that holds an element has the same bits of it."""
    named = gather(ranks, lambda rank, index: rank.parameters[index], shapes)
    for rank in ranks:
        for parameter in rank.parameters:
            for piece in shard_of(parameter).pieces:
                part = named[piece.name][slices(piece.source)]
                assert torch.equal(parameter.detach()[slices(piece.target)].reshape(part.shape), part), piece.name
    return named


def learn(ranks: list[Rank], batches: list[list[Tokens]], rate: float = 1e-2) -> list[float]:
    """Mean losses by step."""

    def work(rank: Rank) -> list[float]:
        return [rank.step(number, batch, rate)[0] for number, batch in enumerate(batches, 1)]

    return [sum(parts) for parts in zip(*in_threads([partial(work, rank) for rank in ranks]), strict=True)]


HELD = {
    "tied": ("llama_mha_tied_bias", CUT),  # a table on two stages
    "heads": ("llama", Layout(shares=((1,) * 5,), dp=(1, 1))),  # kv heads on two ranks
    "routers": ("qwen3_moe", Layout(shares=((2, 1, 1),), dp=(1, 1, 1))),  # routers on all
}


@pytest.mark.parametrize(("held", "way"), covering(HELD, WAYS))
def test_what_several_ranks_hold_stays_alike(held: str, way: str, tmp_path: Path) -> None:
    case, layout = HELD[held]
    save_model(case, tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(4, seed) for seed in range(2)]
    ranks = ranks_of(tmp_path, layout, torch.float32, clip=1.0)
    for rank in ranks:
        rank.buckets.reduction = WAYS[way](rank.buckets)
    losses = learn(ranks, batches)
    close(ranks)
    got = whole_and_alike(ranks, shapes)
    exact, _, want = train_under(tmp_path, layout, batches, torch.float32, shapes, 1e-2, clip=1.0)
    assert all(abs(a - b) < 0.05 * b for a, b in zip(losses, exact, strict=True))
    assert furthest(got, want)[0] > 1e-5, "something was lost"


@pytest.mark.parametrize("way", WAYS)
def test_zero_gives_the_same_bits(way: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(3, seed) for seed in range(2)]

    def lossy(rank: Rank) -> None:
        rank.buckets.reduction = WAYS[way](rank.buckets)

    def under(zero: int) -> Named:
        layout = Layout(dp=(1, 1, 1), zero=zero)  # type: ignore[arg-type]
        return train_under(tmp_path, layout, batches, torch.float32, shapes, 1e-2, lossy)[2]

    want = under(0)
    for zero in (1, 3):
        got = under(zero)
        assert all(torch.equal(got[name], want[name]) for name in want), zero


def learn_locally(
    folder: Path,
    layout: Layout,
    batches: list[list[Tokens]],
    shapes: Named,
    every: int,
    outer: tuple[float, float],
    optimizer: Optimizer,
) -> Named:
    """Weights after the batches, dealt by `layout.dp` to replicas of their own."""
    alone = Layout(layout.stages, layout.order, shares=layout.shares)
    replicas = [ranks_of(folder, alone, torch.float64, optimizer) for _ in layout.dp]
    dps = [local_groups(len(layout.dp), name="dp") for _ in replicas[0]]

    def work(rank: Rank, local: DiLoCo, replica: int) -> None:
        for number, batch in enumerate(batches, 1):
            mine = dealt(batch, layout.dp)[replica]
            rank.step(number, mine, 1e-2)
            local.count_step(sum(microbatch.predicted for microbatch in mine))
            if local.is_due(number):
                local.outer_step()

    tasks = []
    for replica, ranks in enumerate(replicas):
        for place, rank in enumerate(ranks):
            local = DiLoCo(rank.update, GradientGroups(dps[place][replica]), every, *outer)
            tasks.append(partial(work, rank, local, replica))
    in_threads(tasks)
    every_rank = [rank for ranks in replicas for rank in ranks]
    close(every_rank)
    return whole_and_alike(every_rank, shapes)


def test_local_steps_of_one_are_data_parallel(tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(3, seed) for seed in range(3)]
    got = learn_locally(tmp_path, CUT, batches, shapes, 1, (1.0, 0.0), SGD(0.0))
    _, _, want = train_under(tmp_path, CUT, batches, torch.float64, shapes, 1e-2, optimizer=SGD(0.0))
    assert furthest(want, shapes)[0] > 1e-3, "it has learned"
    off, name = furthest(got, want)
    assert off < 1e-12, f"{name} is off by {off}"


@pytest.mark.slow
def test_local_steps_do_not_depend_on_how_a_replica_is_cut(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(3, seed) for seed in range(4)]
    want = learn_locally(tmp_path, Layout(dp=(1, 2)), batches, shapes, 2, (0.7, 0.9), AdamW())
    for layout in (CUT, Layout(2, "zero_bubble", shares=TP2, dp=(1, 2))):
        off, name = furthest(learn_locally(tmp_path, layout, batches, shapes, 2, (0.7, 0.9), AdamW()), want)
        assert off < 1e-12, f"{layout}: {name} is off by {off}"


def late_on_one_rank(folder: Path, batches: list[list[Tokens]], shapes: Named) -> Named:
    """Each step's gradient is kept, and the one of the step before is applied in its place."""
    (rank,) = ranks_of(folder, Layout(), torch.float64, clip=1.0)
    numbers, before = range(len(rank.buckets.layout.buckets)), list[Tensor]()
    for step, batch in enumerate(batches, 1):
        rank.gradients(batch)
        now = [rank.buckets.reduced(number).clone() for number in numbers]
        if before:
            for number in numbers:
                rank.buckets.reduced(number).copy_(before[number])
            rank.norm.clip(1.0)
            rank.update.apply(step - 1, 1e-2)
        before = now
    for number in numbers:
        rank.buckets.reduced(number).copy_(before[number])
    rank.norm.clip(1.0)
    rank.update.apply(len(batches), 1e-2)
    return gather([rank], lambda rank, index: rank.parameters[index], shapes)


@pytest.mark.slow
@pytest.mark.parametrize("zero", soak_but([3], [0, 1, 3]))
def test_late_sums_are_those_of_one_rank_that_waits(zero: Zero, tmp_path: Path) -> None:
    save_model("llama_mha_tied_bias", tmp_path)
    shapes, batches = saved(tmp_path), [random_tokens(4, seed) for seed in range(4)]
    layout = replace(CUT, dp=(1, 1), zero=zero)
    ranks = ranks_of(tmp_path, layout, torch.float64, clip=1.0)
    places = len(ranks) // 2
    links = [local_groups(2, name="late") for _ in range(places)]

    def work(rank: Rank, place: int) -> None:
        groups = GradientGroups(links[place][rank.replica])
        late = rank.buckets.reduction = DelayedReduction(rank.buckets, Exact(), groups)
        for step, batch in enumerate(batches, 1):
            some = late.on_the_way
            rank.gradients(batch)
            if some:
                rank.norm.clip(1.0)
                rank.update.apply(step - 1, 1e-2)
        late.drain()
        rank.norm.clip(1.0)
        rank.update.apply(len(batches), 1e-2)
        late.close()

    in_threads([partial(work, rank, number % places) for number, rank in enumerate(ranks)])
    in_threads([rank.make_whole for rank in ranks])
    got, want = whole_and_alike(ranks, shapes), late_on_one_rank(tmp_path, batches, shapes)
    close(ranks)
    off, name = furthest(got, want)
    assert off < 1e-12, f"{name} is off by {off}"
    at_once = train_under(tmp_path, Layout(), batches, torch.float64, shapes, 1e-2, clip=1.0)[2]
    assert furthest(got, at_once)[0] > 1e-4, "late is not the same as at once"
