"""Who samples is killed in mid-sampling, a rollout server or the policy's own worker: nothing of the run changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster.commands import Running, running
from tests.support.selection import soak_but
from tests.support.training.opened_run import training
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.open_training import OnLoss
from tllm.node.train.training_run import TrainingRun
from tllm.training.job.job import Job
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.report.events import RunEvent, RunLostRank, RunStepped
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch

STEPS, KILLED_AFTER = 4, 2
SAMPLING = 0.5
"""Of the seconds that the sampling of a step takes: about when in it somebody is killed."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to begin with, whose completions are seldom ended before their 48 tokens."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    train(policy_job(folder, folder / "base", max_steps=2), "pp=1")
    return folder


def job_of(task: Path, run: Path, servers: tuple[str, ...] = (), max_staleness: int = 0, **more: Any) -> Job:
    """Sampling takes most of a step: many tokens of each completion, one after another."""
    elsewhere: dict[str, Any] = {}
    if servers:
        elsewhere = dict(rollout_servers=servers, rollout_secret=str(task / "key"), max_staleness=max_staleness)
    run.parent.mkdir(exist_ok=True)
    begin = dict(config_name=None, tokenizer_name=None, model_name_or_path=str(task / "base" / "final"))
    table = grpo(task, num_generations=8, max_completion_length=48, num_completions_to_print=64, **elsewhere)
    sizes = dict(seq_len=56, global_batch_size=32, max_steps=STEPS, save_steps=100, learning_rate=1e-3)
    return policy_job(task, run, table, **begin, **sizes, **more)


async def follow(job: Job, plan: str, on_loss: OnLoss, hurt: Callable[[TrainingRun], object]) -> list[RunEvent]:
    """The news of a run that is hurt in the middle of the sampling of step `KILLED_AFTER` + 1."""
    news: list[RunEvent] = []
    async with training(job, plan, threads=1, on_loss=on_loss) as run:
        async for one in run.events():
            news.append(one)
            if isinstance(one, RunStepped) and one.record.step == KILLED_AFTER:
                seconds = (one.record.role_seconds or {})["sampling"]
                await asyncio.sleep(SAMPLING * seconds)
                hurt(run)
    return news


def check(run: Path, want: Path, is_exact: bool) -> None:
    assert (run / COMPLETIONS).read_text() == (want / COMPLETIONS).read_text()
    found, others = read_records(run / FILE), read_records(want / FILE)
    assert [one.step for one in found] == list(range(1, STEPS + 1))
    limit = 0 if is_exact else 1e-12
    assert max(abs(a.loss - b.loss) for a, b in zip(found, others, strict=True)) <= limit
    got, tensors = final(run), final(want)
    if is_exact:
        assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    off, where = furthest(got, tensors)
    assert off < 1e-11, where


def serve(task: Path, *more: str) -> contextlib.AbstractContextManager[Running]:
    folder = str(task / "base" / "final")
    return running("rollout", folder, "--threads", "1", "--secret", str(task / "key"), *more)


@pytest.mark.parametrize("keys", soak_but([{"dtype": "float64"}], [{"deterministic": True}, {"dtype": "float64"}]))
def test_a_killed_rollout_server_leaves_the_weights_of_the_colocated_run(
    keys: dict[str, Any], task: Path, tmp_path: Path
) -> None:
    """The other is of two processes, which hold the model together, where bits may hang on how many rows each has."""
    asyncio.run(follow(job_of(task, tmp_path / "calm" / "run", **keys), "pp=1", "end", lambda run: None))
    for attempt in range(4):
        again = _killed(task, tmp_path / f"hurt-{attempt}" / "run", keys)
        check(tmp_path / f"hurt-{attempt}" / "run", tmp_path / "calm" / "run", is_exact="deterministic" in keys)
        if any(again):
            break  # else it was lost between two questions, with new weights on their way
    assert sum(again) == 1 and not any(again[:KILLED_AFTER]), "what it was sampling went to the other"


def _killed(task: Path, run: Path, keys: dict[str, Any]) -> list[float]:
    """A run with two servers of which the first is killed: how many questions were asked again in each step."""
    with serve(task) as first, serve(task, *(() if "deterministic" in keys else ("--local", "2"))) as second:
        one, two = (command.until(r"samples at (\S+:\d+)")[1] for command in (first, second))

        def kill(_: TrainingRun) -> None:
            first.process.send_signal(signal.SIGSTOP)
            time.sleep(1.0 + 3 * read_records(run / FILE)[-1].seconds)  # by now the run waits for its answer
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()

        news = asyncio.run(follow(job_of(task, run, (one, two), **keys), "pp=1", "end", kill))
    return [(record.metrics or {})["rollout/questions_asked_again"] for record in records(news)]


@pytest.mark.parametrize("rank", soak_but([0], [0, 1]))
def test_a_policy_worker_that_is_killed_while_it_samples_costs_nothing(rank: int, task: Path, tmp_path: Path) -> None:
    """Rank 0, which has the prompts and rewards, and another; their states are in each other's memory."""
    keys: dict[str, Any] = dict(deterministic=True, mirror_steps=1)
    train(job_of(task, tmp_path / "calm" / "run", **keys), "pp=1")

    def kill(run: TrainingRun) -> None:
        assert isinstance(run, ElasticRun)
        os.kill(run.state.ranks[rank].facts.pid, signal.SIGKILL)

    news = asyncio.run(follow(job_of(task, tmp_path / "hurt" / "run", **keys), "dp=2", "replan", kill))
    assert [one.node for one in news if isinstance(one, RunLostRank)] == [f"local-{rank}"]
    check(tmp_path / "hurt" / "run", tmp_path / "calm" / "run", is_exact=True)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["server", "rank 0"])
def test_who_is_killed_while_steps_are_sampled_ahead_costs_nothing(victim: str, task: Path, tmp_path: Path) -> None:
    """A server, whose questions are asked again with the weights that they had; and who asks, whose next steps'
    completions are in the memory of the other."""
    keys: dict[str, Any] = dict(deterministic=True, mirror_steps=1, max_staleness=2)
    with serve(task) as first, serve(task) as second:
        one, two = (command.until(r"samples at (\S+:\d+)")[1] for command in (first, second))
        train(job_of(task, tmp_path / "calm" / "run", (one, two), **keys), "pp=1")

        def kill(run: TrainingRun) -> None:
            assert isinstance(run, ElasticRun)
            if victim == "server":
                first.process.send_signal(signal.SIGKILL)
                first.process.wait()
            else:
                os.kill(run.state.ranks[0].facts.pid, signal.SIGKILL)

        news = asyncio.run(follow(job_of(task, tmp_path / "hurt" / "run", (one, two), **keys), "dp=2", "replan", kill))
    lost = [event.node for event in news if isinstance(event, RunLostRank)]
    assert lost == ([] if victim == "server" else ["local-0"])
    check(tmp_path / "hurt" / "run", tmp_path / "calm" / "run", is_exact=True)
