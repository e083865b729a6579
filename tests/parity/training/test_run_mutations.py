"""Whole runs with one thing wrong on one rank: the comparison with the golden run must see each of these faults."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.training.runs import final, short_job, train
from tests.support.training.training_step import furthest
from tllm.comm.links.link import Link
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.job.job import Job
from tllm.training.sync.learner import SynchronousLearner
from tllm.training.trainer import RankTrainer

Fault = Callable[[RankTrainer], None]


def learner_of(trainer: RankTrainer) -> SynchronousLearner:
    assert isinstance(trainer._learner, SynchronousLearner)
    return trainer._learner


def buckets_of(trainer: RankTrainer) -> GradientBuckets:
    return learner_of(trainer)._buckets


def replica_of(trainer: RankTrainer) -> int:
    return trainer.config.plan.coordinates(trainer.config.rank).replica


def lose_the_sum_over_dp(trainer: RankTrainer) -> None:
    trainer.config.groups.dp.all_reduce = lambda x: x  # type: ignore[method-assign]


def halve_the_scale(trainer: RankTrainer) -> None:
    learner = learner_of(trainer)
    begin = learner.begin_step
    learner.begin_step = lambda *step: begin(*step) * (0.5 if replica_of(trainer) else 1.0)  # type: ignore[method-assign]


def forget_a_microbatch(trainer: RankTrainer) -> None:
    following = trainer._feed.next

    def less(on_wait: Callable[[str], object]) -> ReplicaBatch:
        batch = following(on_wait)
        return msgspec.structs.replace(batch, rows=batch.rows[1:])

    if replica_of(trainer) == 1:
        trainer._feed.next = less  # type: ignore[method-assign]


def swap_two_ranges(trainer: RankTrainer) -> None:
    """Each of two ranks updates the range of the other, by the gradients of its own."""
    runs, is_first = learner_of(trainer)._update.flat, replica_of(trainer) == 0
    for number, mine in enumerate(runs.mine):
        other = runs.whole[number][-len(mine) :] if is_first else runs.whole[number][: len(mine)]
        runs.mine[number] = other.clone()  # which may overlap the rank's own


def take_the_wrong_bucket(trainer: RankTrainer) -> None:
    """One rank updates two layers by the gradients of each other."""
    buckets = buckets_of(trainer)
    sizes = [bucket.size for bucket in buckets.layout.buckets]
    a, b = next((i, j) for i in range(len(sizes)) for j in range(i) if sizes[i] == sizes[j] > 1000)
    finish, held = buckets.finish, buckets._reduced

    def turned() -> None:
        finish()
        if replica_of(trainer):
            held[a], held[b] = held[b], held[a]

    buckets.finish = turned  # type: ignore[method-assign]


def lose_a_tie(trainer: RankTrainer) -> None:
    """Each of two stages learns its table without the other's part."""
    replicas = buckets_of(trainer).replicas
    assert any("embed" in cell.block.name for cells in replicas._together for cell in cells)
    replicas._together = []


def clip_by_a_part_of_the_norm(trainer: RankTrainer) -> None:
    learner_of(trainer)._norm._over_mesh = lambda ordinary, spread: ordinary + spread  # type: ignore[method-assign]


def swap_two_hops(trainer: RankTrainer) -> None:
    """The first two microbatches of each step change places on their way to the second stage."""
    if trainer.config.plan.coordinates(trainer.config.rank).stage == 0:
        ((link,),) = trainer.config.groups.wires.send.values()
        swap_pairs(link)


def swap_pairs(link: Link) -> None:
    send, kept = link.send, list[torch.Tensor]()

    def turned(x: torch.Tensor) -> None:
        kept.append(x.clone())
        if len(kept) == 2:
            send(kept.pop())
            send(kept.pop())

    link.send = turned  # type: ignore[method-assign]


def forget_the_optimizer(trainer: RankTrainer) -> None:
    """What a save lacks shows when a run goes on from it."""
    for held in learner_of(trainer)._update.state_slices():
        held.flat.zero_()


def lag_the_rate(trainer: RankTrainer) -> None:
    rate = trainer._learning_rate
    trainer._learning_rate = lambda step: rate(max(step - 1, 0))  # type: ignore[method-assign]


FAULTS: list[tuple[Fault, str]] = [
    (lose_the_sum_over_dp, "dp=2"),
    (halve_the_scale, "dp=2"),
    (forget_a_microbatch, "dp=2"),
    (swap_two_ranges, "dp=2,zero=1"),
    (take_the_wrong_bucket, "dp=2,zero=3"),
    (lose_a_tie, "pp=2"),
    (clip_by_a_part_of_the_norm, "pp=2"),
    (swap_two_hops, "pp=2,schedule=gpipe"),
    (lag_the_rate, "tp=2"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama_mha_tied_bias", folder)
    return folder


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = tmp_path_factory.mktemp("golden") / "run"
    train(job_of(model, run), "pp=1")
    return final(run)


def job_of(model: Path, run: Path) -> Job:
    """All rows are of one length, so that no link notices that one stands in the place of another."""
    dice, rows = random.Random(1), run.parent / "even.jsonl"
    lines = ({"input_ids": [dice.randrange(101) for _ in range(12)]} for _ in range(24))
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return short_job(model, run, train_files=(str(rows),), max_steps=2, dtype="float64", max_grad_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "plan"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_in_one_place_shows(
    fault: Fault, plan: str, model: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    train(job_of(model, tmp_path / "right"), plan)
    assert furthest(final(tmp_path / "right"), golden)[0] < 1e-11
    train(job_of(model, tmp_path / "wrong"), plan, damage=fault)
    assert furthest(final(tmp_path / "wrong"), golden)[0] > 1e-6


@pytest.mark.slow
def test_a_state_that_is_forgotten_shows(model: Path, golden: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for name, damage in (("right", lambda trainer: None), ("wrong", forget_the_optimizer)):
        job = job_of(model, tmp_path / name)
        asked = iter((False, True))
        assert train(job, "dp=2,zero=1", lambda asked=asked: next(asked, True))  # type: ignore[misc]
        train(job, "pp=2", damage=damage)
        assert (furthest(final(tmp_path / name), golden)[0] < 1e-11) == (name == "right")
