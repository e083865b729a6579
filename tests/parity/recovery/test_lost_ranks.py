"""A rank is lost at the worst moments: the run goes on from memory, from a step before at most, to the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, records, short_job, train
from tests.support.training.snapshot_epochs import Epochs, Hurt
from tests.support.training.training_step import furthest
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.plan import Plan
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job_parts import training_facts
from tllm.training.job.lora_job import LoraJob
from tllm.training.report.events import RunBegan, RunEvent
from tllm.training.report.metrics import FILE, read_records
from tllm.training.snapshot.replication import SnapshotReplicator
from tllm.training.trainer import RankTrainer

STEP = 3
"""Within which a rank dies."""

Call = Callable[..., Any]


def at(owner: Any, name: str, when: Callable[[], bool], then: Callable[[], object]) -> None:
    """Let something happen in the place of the first call of a method when it is time."""
    before: Call = getattr(owner, name)

    def call(*args: Any) -> Any:
        return then() if when() else before(*args)

    setattr(owner, name, call)


def computing(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """Before its backward passes."""
    at(trainer._model, "forward_backward", lambda: trainer._step == STEP - 1, die)


def updating(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """Before its weights move, while those of others do; with ZeRO they wait for its range."""
    at(trainer._learner._update, "apply", lambda: trainer._step == STEP, die)


def copying(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """With its weights moved, and nobody else has them."""
    at(trainer._state._replicator, "take", lambda: trainer._step == STEP, die)


def sending(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """With its copy on the way: of its tensors some, where there are any to send."""
    mirror = trainer._state._replicator
    assert mirror is not None
    sent = iter(range(1000))
    before = mirror._send

    def send(link: Any, copy: Any, copied: Any) -> None:
        copied.result()
        if copy.label.step == STEP:
            at(link, "send", lambda: next(sent) == 2, die)
        before(link, copy, copied)
        if copy.label.step == STEP:
            die()

    mirror._send = send  # type: ignore[method-assign]


def told(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """With everything done but the record."""
    at(trainer._report, "record", lambda: trainer._step == STEP, die)


def saving(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """While it writes its part of a save."""
    at(trainer._state._saves._saving, "_write_files", lambda: True, die)


def saved_and_told(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """The same, with the save before whole on every rank: it is written while steps go on, and who dies tears it."""

    def wait_and_die() -> None:
        trainer._state._saves._wait()
        die()

    at(trainer._report, "record", lambda: trainer._step == STEP, wait_and_die)


MOMENTS = (computing, updating, copying, sending, told, saving)
PLANS = {
    "dp=2": "ab",
    "pp=2": "ab",
    "tp=2": "ab",
    "cp=2": "ab",
    "dp=2,zero=1": "ab",
    "dp=2,zero=2": "ab",
    "dp=2,zero=3": "ab",
    "dp=2,pp=2": "abcd",
    "dp=2,pp=2,zero=1": "abcd",
    "pp=2,tp=1+2,layers=1+3": "abc",
    "pp=2,chunks=2": "ab",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


def began(news: list[RunEvent]) -> RunBegan:
    return next(one for one in news if isinstance(one, RunBegan))


def check(model: Path, folder: Path, plan: str, moment: Hurt, lost: int, behind: int = 1, **more: Any) -> None:
    """A run that goes on without its lost rank, at most `behind` finished steps before, as one that is never hurt."""
    nodes = PLANS[plan]
    more = dict(max_steps=STEP + 2, save_steps=STEP if moment is saving else 100) | more
    whole, run = folder / "whole", folder / f"without-{lost}"
    if not whole.exists():  # it is the same whoever is lost
        train(short_job(model, whole, **more), plan)  # without any copies
    hurt = Epochs(short_job(model, run, **more))
    first = hurt.run(plan, nodes, {nodes[lost]: moment})
    left = {node: memory.live for node, memory in hurt.copies.items() if memory.live and memory.live.memory.layout}
    other = "z" if lost else nodes[0]  # rank 0 has the data; another process of it, without memory, takes its place
    second = hurt.run(plan, [other if node == nodes[lost] else node for node in nodes])
    again = began(second)
    done = records(first)[-1].step
    assert again.origin == "memory" and STEP - 1 <= done <= STEP
    assert done - behind <= again.step <= STEP, "no more steps are done again"
    now = {node: hurt.copies[node].live for node in left}
    assert all(one is not None and one.memory is left[node].memory for node, one in now.items()), "nothing was moved"
    found = read_records(run / FILE)
    assert [one.step for one in found] == list(range(1, STEP + 3))
    assert [one.loss for one in found] == [one.loss for one in read_records(whole / FILE)]
    got = final(run)
    assert all(torch.equal(got[name], x) for name, x in final(whole).items())


CASES = [
    ("dp=2", computing, 1),
    ("dp=2", updating, 0),
    ("pp=2", sending, 0),
    ("pp=2", copying, 1),
    ("tp=2", saving, 1),
    ("cp=2", told, 1),
    ("dp=2,zero=1", updating, 1),
    ("dp=2,zero=3", updating, 0),
    ("dp=2,pp=2,zero=1", sending, 3),
    ("pp=2,tp=1+2,layers=1+3", updating, 2),
]


@pytest.mark.parametrize(("plan", "moment", "lost"), soak_but(CASES[3:6] + CASES[7:9], CASES))
def test_the_same_plan_goes_on_to_the_bit(plan: str, moment: Hurt, lost: int, model: Path, tmp_path: Path) -> None:
    check(model, tmp_path, plan, moment, lost)


@pytest.mark.parametrize(
    ("plan", "moment", "lost"),
    soak_but(
        [("dp=2,zero=1", updating, 0)],
        [("dp=2,zero=1", updating, 0), ("pp=2", sending, 1), ("pp=2,tp=1+2,layers=1+3", updating, 2)],
    ),
)
def test_an_adapter_goes_on_to_the_bit_beside_a_model_that_is_read_again(
    plan: str, moment: Hurt, lost: int, model: Path, tmp_path: Path
) -> None:
    check(model, tmp_path, plan, moment, lost, lora=LoraJob(r=4, lora_dropout=0.1))


CHANGES = [
    (("pp=2", "pp=1", "pp=2"), ("ab", "a", "az"), ""),
    (("dp=2,pp=2,zero=1", "pp=2", "dp=2,pp=2,zero=1"), ("abcd", "ac", "azcy"), "d"),
    (("tp=2", "pp=1", "dp=2,zero=3"), ("ab", "a", "az"), ""),
]


@pytest.mark.parametrize(("plans", "nodes", "lenders"), soak_but(CHANGES[1:], CHANGES))
def test_fewer_go_on_and_more_take_over_again(
    plans: tuple[str, ...], nodes: tuple[str, ...], lenders: str, model: Path, tmp_path: Path
) -> None:
    """Another plan has other roundings and no other number; nodes that come bring nothing with them.

    With one of four lost and a plan for two, something is in the memory of the third that is left alone.
    """
    job = short_job(model, tmp_path / "run", max_steps=7, save_steps=100, dtype="float64")
    run = Epochs(job)
    run.run(plans[0], nodes[0], {nodes[0][1]: computing})
    live = [memory.live for memory in run.copies.values()]
    assert live and all(one is not None and one.is_unchanged for one in live), "none had updated its weights again"
    pause = {nodes[1][0]: lambda trainer, die: at_step(trainer, 5, die)}
    again = run.run(plans[1], nodes[1], pause, lives=True, lenders=lenders)
    last = run.run(plans[2], nodes[2])
    assert [began(news).origin for news in (again, last)] == ["memory"] * 2
    assert began(again).step in (1, 2) and began(last).step == 5
    whole = Epochs(short_job(model, tmp_path / "whole", max_steps=7, save_steps=100, dtype="float64"))
    want = records(whole.run("pp=1", "a"))
    found = read_records(tmp_path / "run" / FILE)
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6, 7]
    assert max(abs(a.loss - b.loss) / b.loss for a, b in zip(found, want, strict=True)) < 1e-12
    off, name = furthest(final(tmp_path / "run"), final(tmp_path / "whole"))
    assert off < 1e-11, name


def at_step(trainer: RankTrainer, step: int, die: Callable[[], None]) -> None:
    """Between this step and the next."""
    at(trainer._feed, "next", lambda: trainer._step == step, die)


@pytest.mark.parametrize(("lost", "origin"), [("ab", "memory"), ("ac", "save")])
def test_two_at_once(lost: str, origin: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole replica, of which the other one has all; and the same stage of both, so that only the disk has it.

    What the disk gives is written where those that are left have their weights, which are of no step from then on.
    """
    whole = Epochs(short_job(model, tmp_path / "whole", max_steps=5, save_steps=2))
    whole.run("dp=2,pp=2", "abcd")
    run = Epochs(short_job(model, tmp_path / "run", max_steps=5, save_steps=2))
    run.run("dp=2,pp=2", "abcd", dict.fromkeys(lost, saved_and_told))
    lose, restore = SnapshotReplicator.lose_live, AsyncSaves.restore
    lost_theirs, filled = set[int](), list[int]()  # threads, one for each rank

    def losing(replicator: SnapshotReplicator) -> None:
        lose(replicator)
        assert replicator.kept_memory is None
        lost_theirs.add(threading.get_ident())

    def filling(saves: AsyncSaves, *args: Any, **more: Any) -> Any:
        filled.append(threading.get_ident())
        assert filled[-1] in lost_theirs, "filled from a save while it could still be gone back to"
        return restore(saves, *args, **more)

    monkeypatch.setattr(SnapshotReplicator, "lose_live", losing)
    monkeypatch.setattr(AsyncSaves, "restore", filling)
    again = run.run("dp=2,pp=2", "abcd")
    assert len(filled) == (4 if origin == "save" else 0)
    assert began(again).origin == origin
    got = final(tmp_path / "run")
    assert all(torch.equal(got[name], x) for name, x in final(tmp_path / "whole").items())


@pytest.mark.parametrize("plan", soak_but(["pp=2", "dp=2,zero=1"], ["pp=2", "dp=2", "dp=2,zero=1", "dp=2,zero=3"]))
def test_copies_take_what_the_planner_says(plan: str, model: Path, tmp_path: Path) -> None:
    """Each of three float32 numbers of every element twice, of two steps; on all ranks together."""
    job = short_job(model, tmp_path / "run", max_steps=2)
    run = Epochs(job)
    run.run(plan, "ab")
    copies = [copy for one in run.copies.values() for copy in one.complete() if copy is not one.live]
    found = sum(block.tensor.nbytes for copy in copies for block in copy.blocks)
    spec = open_initial_model(job).spec
    ranks = training_bytes(spec, Plan.parse(plan, spec.num_layers), training_facts(job, mirrored=True))
    assert sum(rank.copies for rank in ranks) == pytest.approx(found, rel=1e-3)
    assert found == 4 * 3 * 4 * sum(x.numel() for x in final(tmp_path / "run").values())


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("plan", PLANS)
def test_any_rank_at_any_moment(plan: str, moment: Hurt, model: Path, tmp_path: Path) -> None:
    for lost in range(len(PLANS[plan])):
        check(model, tmp_path, plan, moment, lost)
