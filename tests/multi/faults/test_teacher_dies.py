"""A teacher's process is killed in mid-run: its rows are taught by another, or by the same when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.cluster.commands import Running, running
from tests.support.models.families import save_model
from tests.support.training.opened_run import training
from tests.support.training.runs import final, job_for, records
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.report.events import RunEvent, RunStepped, RunWaits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_model("llama", made / "student")
    save_model("llama", made / "teacher", seed=5, num_hidden_layers=6)
    return made


def teach(folder: Path, port: int = 0) -> contextlib.AbstractContextManager[Running]:
    words = ["--port", str(port)] if port else []
    return running("teach", str(folder / "teacher"), "--threads", "1", "--secret", str(folder / "key"), *words)


def taught_job(folder: Path, run: Path, *addresses: str) -> Job:
    run.parent.mkdir(exist_ok=True)
    keys = DistillationKeys(teachers=addresses, teacher_secret=str(folder / "key"), top_k=8)
    return job_for(folder / "student", run, task="distill", distill=keys, max_steps=8)


async def follow(job: Job, hurt: dict[int, Callable[[], object]]) -> list[RunEvent]:
    """The news of a run in which something happens after some steps; what -1 names, when it says that it waits."""
    news: list[RunEvent] = []
    async with training(job, "pp=1", threads=1, on_loss="end") as run:
        async for one in run.events():
            news.append(one)
            if isinstance(one, RunStepped) and one.record.step in hurt:
                hurt.pop(one.record.step)()
            if isinstance(one, RunWaits) and -1 in hurt:
                hurt.pop(-1)()
    return news


def test_killed_teachers_leave_the_weights_of_an_undisturbed_run(folder: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def start(port: int = 0) -> tuple[Running, str]:
            command = stack.enter_context(teach(folder, port))
            return command, command.until(r"teaches at (\S+:\d+)")[1]

        (first, one), (second, two) = start(), start()
        asyncio.run(follow(taught_job(folder, tmp_path / "calm" / "run", one, two), {}))

        def kill(command: Running) -> None:
            command.process.send_signal(signal.SIGKILL)
            command.process.wait()

        again: list[Running] = []
        hurt: dict[int, Callable[[], object]] = {
            1: lambda: kill(first),
            3: lambda: kill(second),
            # Not waited for: the coordinator is in this very thread.
            -1: lambda: again.append(stack.enter_context(teach(folder, int(two.rpartition(":")[2])))),
        }
        news = asyncio.run(follow(taught_job(folder, tmp_path / "hurt" / "run", one, two), hurt))
        assert len(records(news)) == 8 and len(again) == 1
        waits = [event.reason for event in news if isinstance(event, RunWaits)]
        assert waits and f"{one} (" in waits[0] and f"{two} (" in waits[0], "it says for whom it waits"
    want, got = (final(tmp_path / name / "run") for name in ("calm", "hurt"))
    assert all(torch.equal(want[name], got[name]) for name in want)
