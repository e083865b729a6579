"""Two teachers of two machines each teach a student of two: one of these machines is killed in the middle of a step.
And how far a node is that takes the only teacher's place."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.training.opened_run import play, training
from tests.support.training.runs import final, job_for, saved, train
from tllm.cluster.messages import TakeRole
from tllm.cluster.weight_messages import Bytes, ReadBytes
from tllm.node.train.role_nodes import RoleNodes
from tllm.node.weights.model_folder import ModelFolder
from tllm.spec.process_groups import RoleName
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.report.events import RunEnded, RunEvent, RunLostRank, RunStepped, RunWaits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # six processes that load torch

TEACHERS = ("local-2", "local-3", "local-4", "local-5")


def taught(folder: Path, name: str, **more: Any) -> Job:
    """A deterministic run in float32; `more` is of the job, but for what says where the teacher is."""
    nodes = {key: more.pop(key) for key in ("teacher_nodes", "teacher_plan") if key in more}
    keys = DistillationKeys(teacher_model_name_or_path=str(folder / "teacher"), top_k=8, **nodes)
    fields: dict[str, Any] = dict(lr_scheduler_type="constant", save_steps=10_000, deterministic=True)
    (folder / name).mkdir()
    return job_for(folder / "student", folder / name / "run", task="distill", distill=keys, **{**fields, **more})


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.05)


async def killed_within_a_step(job: Job, node: str) -> list[RunEvent]:
    """The news of a run of which a teacher's machine stands still, until the run waits for it, and is then killed."""
    news: list[RunEvent] = []

    def steps() -> int:
        return sum(isinstance(one, RunStepped) for one in news)

    async with training(job, "dp=2", threads=1, on_loss="replan", lost_after=120.0) as run:

        async def listen() -> None:
            async for one in run.events():
                news.append(one)

        listening = asyncio.create_task(listen())
        await until(lambda: steps() >= 2)
        member = run.state.member(node)
        assert member is not None
        os.kill(member.facts.pid, signal.SIGSTOP)
        await until(lambda: isinstance(news[-1], RunWaits))
        os.kill(member.facts.pid, signal.SIGKILL)
        before = steps()
        await until(lambda: steps() >= before + 3)
        run.stop()
        await listening
    return news


def test_a_machine_of_a_team_of_teachers_is_killed_within_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other team teaches what it was asked; the run says who is lost and who waits for another; and the weights
    have the bits of the run in one process that has the whole teacher beside it."""
    save_model("llama", tmp_path / "student")
    save_model("llama", tmp_path / "teacher", seed=5, num_hidden_layers=6)
    job = taught(tmp_path, "apart", max_steps=5000, teacher_nodes=TEACHERS, teacher_plan="pp=2")
    news: list[RunEvent] = []

    async def scene() -> None:
        news.extend(await killed_within_a_step(job, "local-3"))

    play(scene(), 240)
    (waits,) = [one.reason for one in news if isinstance(one, RunWaits)]
    assert "of the teachers local-2 (computing), local-4 (computing)" in waits
    assert not any(isinstance(one, RunLostRank) for one in news), "it interrupts nothing"
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("lost local-3: ") for line in said)
    assert "local-2 waits for another to teach with, as local-3 of its team is lost" in said
    steps = [one.record.step for one in news if isinstance(one, RunStepped)]
    assert steps == list(range(1, len(steps) + 1))
    train(taught(tmp_path, "calm", max_steps=len(steps)), "pp=1")
    want, got = final(tmp_path / "calm" / "run"), saved(tmp_path / "apart" / "run", len(steps))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def test_a_run_says_how_far_a_node_has_read_that_takes_a_lost_teachers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has no file of the teacher, and reads no further until the run has said it."""
    save_model("llama", tmp_path / "student")
    save_model("llama", tmp_path / "teacher", seed=5, num_hidden_layers=6)
    job = taught(tmp_path, "apart", max_steps=5000, teacher_nodes=("local-1",))
    order, read, is_lost, is_said = RoleNodes._order, ModelFolder.read, threading.Event(), threading.Event()
    half, news = (tmp_path / "teacher" / "model.safetensors").stat().st_size // 2, list[RunEvent]()

    def elsewhere(self: RoleNodes, role: RoleName) -> TakeRole:
        return msgspec.structs.replace(order(self, role), folder=str(tmp_path / "nowhere"))

    def slowly(self: ModelFolder, wanted: ReadBytes) -> Bytes:
        if is_lost.is_set() and wanted.start > half:
            is_said.wait(45)  # less than the node waits for what it asks
        return read(self, wanted)

    monkeypatch.setattr(RoleNodes, "_order", elsewhere)
    monkeypatch.setattr(ModelFolder, "read", slowly)

    async def scene() -> None:
        async with training(job, "pp=1", threads=1, on_loss="replan") as run:
            async for one in run.events():
                news.append(one)
                if isinstance(one, RunStepped) and not is_lost.is_set():
                    is_lost.set()
                    member = run.state.member("local-1")
                    assert member is not None
                    os.kill(member.facts.pid, signal.SIGKILL)
                if isinstance(one, RunWaits) and re.search(r"local-1 \(has read .* of .* of its model\)$", one.reason):
                    is_said.set()
                if isinstance(one, RunStepped) and is_said.is_set():
                    run.stop()

    play(scene(), 240)
    assert is_said.is_set()
    steps = [one.record.step for one in news if isinstance(one, RunStepped)]
    assert steps == list(range(1, len(steps) + 1)) and isinstance(news[-1], RunEnded)
