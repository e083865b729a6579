"""`tllm rollout --nodes`: machines that hold the policy together sample for a run, and one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.commands import Running, running
from tests.support.selection import soak_but
from tests.support.training.opened_run import training
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import INTERRUPTED
from tllm.training.job.job import Job
from tllm.training.job.job_file import TYPES, ResolvedJob, write_job
from tllm.training.report.events import RunEvent, RunStepped
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch

STEPS = 8
JOIN = r"tllm join (\S+) --token (\S+)"
SAMPLES = r"samples at (\S+:\d+)"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    train(policy_job(folder, folder / "base", max_steps=2), "pp=1")
    return folder


def job_of(task: Path, run: Path, *servers: str) -> Job:
    elsewhere = dict(rollout_servers=servers, rollout_secret=str(task / "key")) if servers else {}
    begin = dict(config_name=None, tokenizer_name=None, model_name_or_path=str(task / "base" / "final"))
    table = grpo(task, num_generations=8, max_completion_length=48, **elsewhere)
    sizes: dict[str, Any] = dict(seq_len=56, global_batch_size=32, max_steps=STEPS, save_steps=100)
    return policy_job(task, run, table, **begin, **sizes, dtype="float64")


def sampling(task: Path, *more: str) -> contextlib.AbstractContextManager[Running]:
    words = ["--threads", "1", "--secret", str(task / "key"), *more]
    return running("rollout", str(task / "base" / "final"), *words)


def joined(line: re.Match[str], name: str) -> contextlib.AbstractContextManager[Running]:
    return running("join", line[1], "--token", line[2], "--name", name, "--threads", "1")


async def follow(job: Job, hurt: Callable[[float], object]) -> list[RunEvent]:
    """The news of a run, and what is done after its second step, whose seconds it is told, while it goes on."""
    news: list[RunEvent] = []
    hurting: asyncio.Task[object] | None = None
    async with training(job, "pp=1", threads=1, on_loss="end") as run:
        async for one in run.events():
            news.append(one)
            if isinstance(one, RunStepped) and one.record.step == 2:
                hurting = asyncio.create_task(asyncio.to_thread(hurt, one.record.seconds))
    assert hurting is not None
    await hurting
    return news


@pytest.mark.parametrize("on_loss", soak_but(["replan"], ["replan", "wait"]))
def test_a_machine_that_is_killed_while_it_samples_is_named_and_costs_nothing(
    on_loss: str, task: Path, tmp_path: Path
) -> None:
    """Those that are left sample on, at the same address; or the run waits until another has joined."""
    if not (task / "calm").exists():
        train(job_of(task, task / "calm"), "pp=1")
    nodes = ["--nodes", "2", "--cluster-host", "127.0.0.1", "--plan", "pp=2", "--on-loss", on_loss]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(sampling(task, *nodes))
        line = first.until(JOIN)
        other = stack.enter_context(joined(line, "other"))
        address = first.until(SAMPLES)[1]

        def kill(seconds: float) -> None:
            other.process.send_signal(signal.SIGSTOP)
            time.sleep(1 + 3 * seconds)  # the two have been asked of another step by now, and the run waits
            other.process.send_signal(signal.SIGKILL)
            other.process.wait()
            again = first.until(JOIN)  # by which another may come
            assert again[1] == line[1]
            if on_loss == "wait":
                stack.enter_context(joined(again, "another"))

        news = asyncio.run(follow(job_of(task, tmp_path / "run", address), kill))
        code, said = first.interrupt()
    assert code == 0 and "lost other: " in said and "Traceback" not in said, said
    metrics = [one.metrics or {} for one in records(news)]
    assert len(metrics) == STEPS and sum(one["rollout/questions_asked_again"] for one in metrics) > 0
    off, where = furthest(final(tmp_path / "run"), final(task / "calm"))
    assert off < 1e-11, where


def test_machines_that_sample_take_the_plan_that_is_predicted_fastest(task: Path, tmp_path: Path) -> None:
    """And they tell what completions took beside what was predicted of as many and as long."""
    few = dict(max_steps=4)
    train(replace(job_of(task, tmp_path / "alone"), **few), "pp=1")
    load = ["--prompt", "8", "--max-completion-length", "48", "--run-dtype", "float64"]
    nodes = ["--nodes", "2", "--cluster-host", "127.0.0.1", *load]
    with sampling(task, *nodes) as first, joined(first.until(JOIN), "other"):
        first.until(r"^plan \S+ on local-0.*, the best of \d+ that have room$")
        first.until(r"^predicted: \S+ s for 8 completions of 48 tokens of a prompt of 8, for 4 prompts, \S+ tok")
        job = replace(job_of(task, tmp_path / "run", first.until(SAMPLES)[1]), **few)
        train(job, "pp=1")
        time.sleep(3)  # the node tells of its answers every so often
        first.process.send_signal(signal.SIGINT)
        first.until(r"^\d+ answers?, each 8 completions of \d+ tokens of a prompt of \d+, for 4 prompts:$")
        first.until(r"predicted +measured +measured is")
        first.until(r"^seconds ")
        code, said = first.wait()
    assert code == 0 and "Traceback" not in said, said
    off, where = furthest(final(tmp_path / "run"), final(tmp_path / "alone"))
    assert off < 1e-11, where


def test_ctrl_c_ends_a_run_whose_rollout_servers_are_gone(task: Path, tmp_path: Path) -> None:
    """At the first one, with the steps before saved, and exit code 130; the same command goes on from there."""
    run = tmp_path / "run"
    with sampling(task) as server:
        file = tmp_path / "job.toml"
        job = replace(job_of(task, run, server.until(SAMPLES)[1]), max_steps=200)
        file.write_text(write_job(ResolvedJob(job, dict.fromkeys(TYPES, "test"))))
        with running("train", str(file), "--threads", "1") as trainer:
            trainer.until(r"^step +2/200")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            time.sleep(2)  # it waits by then
            began = time.monotonic()
            code, said = trainer.interrupt()
            assert code == INTERRUPTED and "Traceback" not in said, said
            assert time.monotonic() - began < 20, "it waits for no server"
    steps = read_records(run / FILE)[-1].step
    assert steps >= 2 and (run / f"step-{steps}").is_dir()
