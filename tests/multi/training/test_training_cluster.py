"""Training over processes: what a run tells, how it ends, and who is named when a rank fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.models.families import save_model
from tests.support.training.opened_run import play, training
from tests.support.training.runs import final, job_for, records, train
from tests.support.training.stand_in_trainer import IN_ORDER, LATE, NONE, Fault, start_node
from tests.support.training.training_step import furthest
from tllm.core.errors import CapacityError, ClusterError, ConfigError, TllmError
from tllm.core.memory import amount
from tllm.node.sources.node_source import JoinLine
from tllm.node.train.open_training import TrainingRun
from tllm.planner.cost.cache_room import RUNTIME_BYTES
from tllm.training.job.job import Job
from tllm.training.report.events import RunBegan, RunEnded, RunEvent, RunStepped

NODES = ("east", "west", "north")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Job:
    (tmp_path / "run").mkdir()
    return job_for(model, tmp_path / "run", max_steps=4)


SECONDS = 120.0
"""Of a scene."""


class Joined:
    """Nodes that join by what they are told, with the stand-in for the trainer."""

    def __init__(self, fault: Fault | None, nodes: Sequence[str]) -> None:
        self.fault, self.nodes = fault, nodes
        self.processes: list[ForkServerProcess] = []

    def invite(self, count: int, address: str, token: str) -> None:
        self.processes = [start_node(address, token, node, self.fault) for node in self.nodes]

    def codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(60)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def join() -> Iterator[Callable[..., Joined]]:
    made: list[Joined] = []

    def make(fault: Fault | None = NONE, nodes: Sequence[str] = NODES) -> Joined:
        made.append(Joined(fault, nodes))
        return made[-1]

    yield make
    for joined in made:
        joined.kill()


@contextlib.asynccontextmanager
async def joined_run(job: Job, joined: Joined) -> AsyncIterator[TrainingRun]:
    where = dict(local=0, source=JoinLine(joined.invite), join_seconds=120.0)
    async with training(job, f"dp={len(joined.nodes)}", **where) as run:
        yield run


async def collect(run: TrainingRun) -> list[RunEvent]:
    return [news async for news in run.events()]


def test_processes_train_what_threads_do(model: Path, tmp_path: Path) -> None:
    """In float64: float32 products round by where their operands lie in memory, which no two processes share."""
    job = job_for(model, tmp_path / "threads", max_steps=4, dtype="float64")
    want = [record.loss for record in records(train(job, "pp=2"))]
    here = replace(job, output_dir=str(tmp_path / "processes"))
    seen: dict[str, tuple[int, int]] = {}

    async def scene() -> None:
        tell = lambda what, done, total: seen.update({what: (done, total)})  # noqa: E731
        async with training(here, "pp=2", on_progress=tell) as run:
            news = await collect(run)
            assert [record.loss for record in records(news)] == pytest.approx(want, rel=1e-12)
            assert isinstance(news[0], RunBegan) and isinstance(news[-1], RunEnded)
            assert news[-1].final == str(tmp_path / "processes" / "final")
            assert run.state.is_done
            assert all(m.parameter_bytes > 0 and m.loaded and m.loaded.state_bytes > 0 for m in run.state.ranks)

    play(scene(), SECONDS)
    assert len(seen) == 2 and all(done == total > 0 for done, total in seen.values())
    off, name = furthest(final(tmp_path / "processes"), final(tmp_path / "threads"))
    assert off < 1e-11, name
    assert wait_until_gone(descendants()) == []


def test_the_end_is_told_when_every_rank_has_ended(job: Job, join: Callable[..., Joined]) -> None:
    joined = join(Fault("late", "north"))

    async def scene() -> None:
        async with joined_run(job, joined) as run:
            news = await collect(run)
            assert Path(job.output_dir, LATE).exists(), "the run ended before its last rank"
            assert [record.step for record in records(news)] == [1, 2, 3, 4]
            assert news[-1] == RunEnded(4, "final")

    play(scene(), SECONDS)
    assert joined.codes() == [0, 0, 0]


def test_a_stop_lets_every_rank_end_after_the_same_step(job: Job, join: Callable[..., Joined]) -> None:
    joined = join()

    async def scene() -> None:
        async with joined_run(replace(job, max_steps=10_000), joined) as run:
            news = run.events()
            while not isinstance(await anext(news), RunStepped):
                pass
            run.stop()
            *_, last = [one async for one in news]
            assert isinstance(last, RunEnded) and last.final == "" and last.step < 1000

    play(scene(), SECONDS)
    assert joined.codes() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("SIGKILL", ClusterError, r"node west \(rank \d, layers \[0, 4\)\) went away"),
        ("SIGSTOP", ClusterError, r"node west \(rank \d, layers \[0, 4\)\) has been silent for"),
        ("refuse", ConfigError, r"node west \(rank \d, layers \[0, 4\)\): row 3 of the data is no row"),
        ("fault", TllmError, r"node west \(rank \d, .*\): RuntimeError: something is broken"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(
    kind: str,
    error: type[TllmError],
    words: str,
    job: Job,
    join: Callable[..., Joined],
) -> None:
    """Links wait for ten minutes, five times as long as the scene may take: the others learn of it from the
    coordinator."""
    joined = join(Fault(kind, "west"))

    async def scene() -> None:
        async with joined_run(job, joined) as run:
            with pytest.raises(error, match=words) as caught:
                await collect(run)
            assert type(caught.value) is error

    play(scene(), SECONDS)
    east, west, north = joined.processes
    for process in (east, north):  # before what is stopped goes, and its links with it
        process.join(60)
        assert process.exitcode == IN_ORDER + ClusterError.exit_code
    west.kill()
    west.join()
    assert west.exitcode != 0


def test_a_rank_that_takes_more_than_it_was_given_ends_alone_and_is_named(
    job: Job, join: Callable[..., Joined]
) -> None:
    """Before the machine's memory is full: the limit is the system's, and the others lose nothing but their run."""
    joined = join(Fault("hungry", "west", memory=1 << 30))
    words = r"node west \(rank \d, layers \[0, 4\)\): out of memory: it holds \S+ MiB .* 1.00 GiB that it was"

    async def scene() -> None:
        async with joined_run(job, joined) as run:
            assert all(member.facts.is_given and member.beat.peak_bytes for member in run.state.ranks)
            with pytest.raises(CapacityError, match=words):
                await collect(run)

    play(scene(), SECONDS)
    assert joined.codes() == [
        IN_ORDER + (CapacityError if node == "west" else ClusterError).exit_code for node in joined.nodes
    ]


def test_a_plan_that_does_not_fit_what_was_given_is_refused(job: Job, join: Callable[..., Joined]) -> None:
    joined = join(Fault(memory=RUNTIME_BYTES))

    async def scene() -> None:
        with pytest.raises(CapacityError, match=rf"the ranks on \w+ need .* and it has {amount(RUNTIME_BYTES)}, "):
            async with joined_run(job, joined):
                pass

    play(scene(), SECONDS)
    joined.codes()


def test_a_rank_that_cannot_begin_is_named(job: Job, join: Callable[..., Joined]) -> None:
    """The others wait for it in their first barrier."""
    joined = join(Fault("bad start", "north"))

    async def scene() -> None:
        with pytest.raises(ConfigError, match=r"node north \(rank \d, layers \[0, 4\)\): there is no data"):
            async with joined_run(job, joined):
                pass

    play(scene(), SECONDS)
    assert joined.codes() == [IN_ORDER + ClusterError.exit_code] * 3


def test_a_rank_that_waits_for_a_killed_one_wakes(job: Job, join: Callable[..., Joined]) -> None:
    """With the true trainer, its threads that read and save included: it ends in order, before it is ended by force."""
    joined = join(None, ("east", "west"))

    async def scene() -> None:
        async with joined_run(replace(job, max_steps=10_000, save_steps=2), joined) as run:
            news = run.events()
            async for one in news:
                if isinstance(one, RunStepped) and one.record.step == 3:
                    break
            os.kill(run.state.ranks[1].facts.pid, signal.SIGKILL)
            with pytest.raises(ClusterError, match=r"node \w+ \(rank 1, layers \[0, 4\)\) went away"):
                async for _ in news:
                    pass
            left = joined.processes[joined.nodes.index(run.state.ranks[0].node)]
            await asyncio.to_thread(left.join, 60)
            assert left.exitcode == IN_ORDER + ClusterError.exit_code

    play(scene(), SECONDS)
