"""Training outlives its nodes: killed, stopped, replaced or left out, with the numbers of the undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.models.families import save_model
from tests.support.training.opened_run import play, training
from tests.support.training.runs import final, job_for, records, saved, train
from tests.support.training.stand_in_trainer import IN_ORDER, Fault, start_node
from tests.support.training.training_step import furthest
from tllm.core.errors import ClusterError, ConfigError
from tllm.node.sources.node_source import JoinLine
from tllm.node.train.elastic_run import ElasticRun
from tllm.training.job.job import Job
from tllm.training.report.events import RunEnded, RunEvent, RunLostRank, RunResumed, RunStepped
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


SECONDS = 140.0
"""Of a scene."""


@contextlib.asynccontextmanager
async def lasting(job: Job, plan: str, **options: Any) -> AsyncIterator[ElasticRun]:
    async with training(job, plan, **{"on_loss": "replan", "threads": 1, **options}) as run:
        assert isinstance(run, ElasticRun)
        yield run


async def follow(run: ElasticRun, hurt: dict[int, Callable[[], object]], resumed: int = 0) -> list[RunEvent]:
    """The news of a run in which something happens after each of some steps. It is stopped some steps after it has gone
    on so often, since of a run that ends by itself nobody knows how long it takes to its end on a busy machine."""
    news: list[RunEvent] = []
    async for one in run.events():
        news.append(one)
        if isinstance(one, RunStepped) and one.record.step in hurt:
            hurt.pop(one.record.step)()
        stop_after(run, news, resumed)
    return news


def stop_after(run: ElasticRun, news: list[RunEvent], resumed: int) -> None:
    """Stop a run that has gone on so often, and taken MORE steps since."""
    at = [number for number, one in enumerate(news) if isinstance(one, RunResumed)]
    if len(at) == resumed > 0 and len(told(news[at[-1] :], RunStepped)) == MORE:
        run.stop()


def kill(run: ElasticRun, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(run.state.ranks[rank].facts.pid, number)


class Joining:
    """Nodes that join one after another by the last line that they were told."""

    def __init__(self, first: int, fault: Fault | None = None) -> None:
        self.left, self.fault = first, fault
        self.address = ""
        self.processes: list[ForkServerProcess] = []

    def invite(self, count: int, address: str, token: str) -> None:
        self.address = address
        while self.left:
            self.left -= 1
            self.join(token)

    def join(self, token: object) -> None:
        name = f"node-{len(self.processes)}"
        self.processes.append(start_node(self.address, str(token), name, self.fault))

    def end(self) -> list[int | None]:
        for process in self.processes:
            process.join(60)
            process.kill()
            process.join()
        return [process.exitcode for process in self.processes]


Numbers = tuple[list[float], dict[str, torch.Tensor]]
Whole = Callable[[int], Numbers]


def check(job: Job, whole: Whole) -> None:
    """The losses and weights of the undisturbed run of as many steps, each step once."""
    found = read_records(Path(job.output_dir) / FILE)
    losses, weights = whole(len(found))
    assert [one.step for one in found] == list(range(1, len(losses) + 1))
    assert max(abs(one.loss - loss) / loss for one, loss in zip(found, losses, strict=True)) < 1e-12
    off, name = furthest(saved(Path(job.output_dir), len(found)), weights)
    assert off < 1e-11, name


def told(news: list[RunEvent], kind: type[Any]) -> list[Any]:
    return [one for one in news if isinstance(one, kind)]


STEPS = 5000
"""More than any of these runs takes."""
MORE = 4
"""Steps that a run takes before it is stopped."""
ROWS = 16
"""Of a step."""


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Losses and weights of an undisturbed run of so many steps on one rank. In float64, as no two processes round
    float32 alike."""

    @cache
    def run(steps: int) -> Numbers:
        folder = tmp_path_factory.mktemp("whole") / "run"
        news = train(long_job(model, folder, max_steps=steps), "pp=1")
        return [record.loss for record in records(news)], final(folder)

    return run


def long_job(model: Path, folder: Path, **more: Any) -> Job:
    """How long it is to be changes no step."""
    keys: dict[str, Any] = dict(max_steps=STEPS, save_steps=10_000, dtype="float64", global_batch_size=ROWS)
    return job_for(model, folder, **{**keys, "lr_scheduler_type": "constant", **more})


def test_one_worker_after_another_is_killed_and_started_again(model: Path, whole: Whole, tmp_path: Path) -> None:
    """A stage, then the one that reads the data; both go on from the memory of the other."""
    job = long_job(model, tmp_path / "run")

    async def scene() -> None:
        async with lasting(job, "pp=2") as run:
            news = await follow(run, {6: lambda: kill(run, 1), 14: lambda: kill(run, 0)}, resumed=2)
            assert [one.node for one in told(news, RunLostRank)] == ["local-1", "local-0"]
            assert "node local-1 (rank 1, layers [2, 4))" in told(news, RunLostRank)[0].reason
            again = told(news, RunResumed)
            assert [one.origin for one in again] == ["memory"] * 2 and all(one.again <= 1 for one in again)
            assert {one.nodes for one in again} == {("local-0", "local-1")}
            assert isinstance(news[-1], RunEnded) and run.state.epoch == 3

    play(scene(), SECONDS)
    check(job, whole)
    assert wait_until_gone(descendants()) == []


def test_a_spare_takes_a_seat_then_fewer_go_on_then_one_joins(model: Path, whole: Whole, tmp_path: Path) -> None:
    job = long_job(model, tmp_path / "run")
    joining = Joining(2)
    waiting: list[asyncio.Task[None]] = []

    async def join_while_stopped(run: ElasticRun, count: int, then: Callable[[], object]) -> None:
        """So few steps would all be done before a node can come and make so many."""
        kill(run, 0, signal.SIGSTOP)
        joining.join(run.coordinator.token(1))
        while len(run.state.living) < count:
            await asyncio.sleep(0.01)
        then()
        kill(run, 0, signal.SIGCONT)

    async def wait_until_worth(run: ElasticRun) -> None:
        """It takes a step to see who has come, and as long as the last pause until that is worth another."""
        step = run.progress.step
        while run.progress.step == step:
            await asyncio.sleep(0.01)
        kill(run, 0, signal.SIGSTOP)
        await asyncio.sleep(run.recovery.growth.pause)
        kill(run, 0, signal.SIGCONT)

    def join(run: ElasticRun, count: int, then: Callable[[], object]) -> None:
        waiting.append(asyncio.create_task(join_while_stopped(run, count, then)))

    async def scene() -> None:
        waits = dict(join_seconds=120, lost_after=60.0)  # for the one that is stopped
        async with lasting(job, "pp=2", local=0, source=JoinLine(joining.invite), **waits) as run:
            hurt: dict[int, Callable[[], object]] = {
                4: lambda: join(run, 3, lambda: kill(run, 1)),
                10: lambda: kill(run, 1),
                14: lambda: join(run, 2, lambda: waiting.append(asyncio.create_task(wait_until_worth(run)))),
            }
            news = await follow(run, hurt, resumed=3)
            spare, fewer, more = told(news, RunResumed)
            assert (spare.plan, fewer.plan, more.plan) == (PP2, "pp=1,tp=1,layers=4", PP2)
            assert spare.nodes[0] == fewer.nodes[0] == more.nodes[0] and more.nodes[1] == "node-3"
            assert [one.origin for one in (spare, fewer, more)] == ["memory"] * 3
            assert more.again == 0, "who joins is taken in between steps"

    play(scene(), SECONDS)
    joining.end()
    check(job, whole)


PP2 = "pp=2,tp=1+1,layers=2+2"


def test_one_that_is_stopped_is_waited_for(model: Path, whole: Whole, tmp_path: Path) -> None:
    """Its links are open, and it is only silent; others join in its place."""
    job = long_job(model, tmp_path / "run")
    joining = Joining(2)

    async def scene() -> None:
        options = dict(local=0, source=JoinLine(joining.invite), join_seconds=120, on_loss="wait", lost_after=5.0)
        async with lasting(job, "tp=2", **options) as run:
            hurt = {5: lambda: kill(run, 1, signal.SIGSTOP)}
            news: list[RunEvent] = []
            async for one in run.events():
                news.append(one)
                if isinstance(one, RunStepped) and one.record.step in hurt:
                    hurt.pop(one.record.step)()
                if isinstance(one, RunLostRank):
                    assert "has been silent for" in one.reason
                    joining.join(run.coordinator.token(1))
                stop_after(run, news, 1)
            (again,) = told(news, RunResumed)
            assert again.nodes[1] == "node-2" and again.plan == "pp=1,tp=2,layers=4" and again.origin == "memory"

    play(scene(), SECONDS)
    joining.end()
    check(job, whole)


def test_a_run_that_fails_by_itself_ends_as_ever(model: Path, tmp_path: Path) -> None:
    job = long_job(model, tmp_path / "run")
    (tmp_path / "run").mkdir()
    joining = Joining(3, Fault("refuse", "node-1"))

    async def scene() -> None:
        async with lasting(job, "dp=3", local=0, source=JoinLine(joining.invite), join_seconds=120) as run:
            with pytest.raises(ConfigError, match=r"node node-1 \(rank \d, .*\): row 3 of the data is no row"):
                await follow(run, {})

    play(scene(), SECONDS)
    own, others = IN_ORDER + ConfigError.exit_code, IN_ORDER + ClusterError.exit_code
    assert joining.end() == [others, own, others]
