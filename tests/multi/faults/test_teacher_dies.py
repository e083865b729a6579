"""A teacher's process is killed in mid-run: its rows are taught by another, or by the same when it is back. So is one
of several processes that are one teacher."""

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

import numpy as np
import pytest
import torch

from tests.support.cluster.commands import Running, running
from tests.support.models.families import save_model
from tests.support.training.opened_run import training
from tests.support.training.runs import final, job_for, records, saved
from tllm.cluster.tls import data_client
from tllm.core.errors import LinkError
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.run_connection import RunConnection
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.report.events import RunEvent, RunStepped, RunWaits
from tllm.training.teachers.teacher_messages import TEACHING, Answer, Lesson, Question, packed
from tllm.training.teachers.teacher_model import TeacherModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch


STEPS, MORE = 5000, 4
"""More steps than a run takes, and after how many it is stopped when all has happened that is to happen to it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_model("llama", made / "student")
    save_model("llama", made / "teacher", seed=5, num_hidden_layers=6)
    return made


def teach(folder: Path, port: int = 0, *more: str) -> contextlib.AbstractContextManager[Running]:
    words = ["--port", str(port), "--secret", str(folder / "key"), *more]
    return running("teach", str(folder / "teacher"), "--threads", "1", *words)


def taught_job(folder: Path, run: Path, *addresses: str) -> Job:
    run.parent.mkdir(exist_ok=True)
    keys = DistillationKeys(teachers=addresses, teacher_secret=str(folder / "key"), top_k=8)
    more: dict[str, Any] = dict(max_steps=STEPS, save_steps=10_000, lr_scheduler_type="constant")
    return job_for(folder / "student", run, task="distill", distill=keys, **more)


async def follow(job: Job, hurt: dict[int, Callable[[], object]]) -> list[RunEvent]:
    """The news of a run in which something happens after some steps; what -1 names, when it says that it waits. It is
    stopped MORE steps after all has happened."""
    news, after = list[RunEvent](), 0
    async with training(job, "pp=1", threads=1, on_loss="end") as run:
        async for one in run.events():
            news.append(one)
            if isinstance(one, RunStepped) and one.record.step in hurt:
                hurt.pop(one.record.step)()
            if isinstance(one, RunWaits) and -1 in hurt:
                hurt.pop(-1)()
            if isinstance(one, RunStepped) and not hurt:
                after += 1
                if after == MORE:
                    run.stop()
    return news


def test_killed_teachers_leave_the_weights_of_an_undisturbed_run(folder: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def start(port: int = 0) -> tuple[Running, str]:
            command = stack.enter_context(teach(folder, port))
            return command, command.until(r"teaches at (\S+:\d+)")[1]

        (first, one), (second, two) = start(), start()

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
        steps = len(records(news))
        assert steps >= 3 + MORE and len(again) == 1
        waits = [event.reason for event in news if isinstance(event, RunWaits)]
        assert waits and f"{one} (" in waits[0] and f"{two} (" in waits[0], "it says for whom it waits"
        calm = replace(taught_job(folder, tmp_path / "calm" / "run", two), max_steps=steps)
        asyncio.run(follow(calm, {steps: lambda: None}))
    want, got = final(tmp_path / "calm" / "run"), saved(tmp_path / "hurt" / "run", steps)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


LESSON = Lesson(9, 1.0, 101, "", hidden_states=(1, -1), hidden_size=48)
ROW = Question(1, packed(np.arange(3, 26)), (9, 14), packed(np.array([0, 3, 8, 11, 22])))


def asked(folder: Path, address: str, lesson: Lesson = LESSON, times: int = 1) -> Answer | str:
    """What a teacher says of a row, asked so often, or why it does not teach this. LinkError where none is there."""
    host, _, port = address.rpartition(":")
    context = data_client(shared_identity(folder / "key", "student", "tllm teach"))
    connection = RunConnection.dial(TEACHING, AnswererPlace(address, (host, int(port))), context)
    try:
        if refused := connection.introduce(lesson).refused:
            return refused
        answers = list[Answer]()
        for _ in range(times):
            connection.send_question(ROW)
            answers.append(connection.receive_answer()[0])
        assert all(answer == answers[0] for answer in answers)
        return answers[0]
    finally:
        connection.close()


def once_there(folder: Path, address: str) -> Answer | str:
    """The same of a teacher that may be a moment away."""
    until = time.monotonic() + 120
    while True:
        try:
            return asked(folder, address)
        except LinkError:
            assert time.monotonic() < until
            time.sleep(0.1)


def test_a_teacher_over_nodes_outlives_one_of_them(folder: Path) -> None:
    """It says what one process says, to the bit; goes on with those that are left, at the same address; and it says
    which node is lost, and by what line another comes."""
    want = TeacherModel.open(str(folder / "teacher")).answer(ROW, LESSON)
    nodes = ["--nodes", "2", "--cluster-host", "127.0.0.1", "--plan", "pp=2"]
    line = r"tllm join (\S+) --token (\S+)"

    def join(words: re.Match[str]) -> contextlib.AbstractContextManager[Running]:
        return running("join", words[1], "--token", words[2], "--name", "other", "--threads", "1")

    with teach(folder, 0, *nodes) as teacher:
        first = teacher.until(line)
        with join(first) as other:
            address = teacher.until(r"teaches at (\S+:\d+)")[1]
            assert asked(folder, address) == want
            refused = asked(folder, address, Lesson(9, 1.0, 101, "another"))
            assert isinstance(refused, str) and "are not the student's" in refused
            other.process.send_signal(signal.SIGKILL)
            other.process.wait()
            assert teacher.until(line)[1] == first[1], "another may come"
        assert once_there(folder, address) == want
        code, said = teacher.interrupt()
    assert code == 0 and "lost other: " in said and "Traceback" not in said, said


def test_a_teacher_over_nodes_takes_the_plan_that_is_predicted_fastest(folder: Path) -> None:
    """And it tells what rows took beside what was predicted of rows as long."""
    want = TeacherModel.open(str(folder / "teacher")).answer(ROW, LESSON)
    nodes = ["--nodes", "2", "--cluster-host", "127.0.0.1", "--row", "64", "--leave-out", "never"]
    with teach(folder, 0, *nodes) as teacher:
        words = teacher.until(r"tllm join (\S+) --token (\S+)")
        with running("join", words[1], "--token", words[2], "--name", "other", "--threads", "1"):
            plan = teacher.until(r"^plan (\S+) on local-0 other, the best of \d+ that have room$")[1]
            teacher.until(r"^predicted: \S+ s for a row of 64 tokens, \S+ tokens/s, \S+ MiB at most on a node$")
            answer = asked(folder, teacher.until(r"teaches at (\S+:\d+)")[1], times=12)
            assert isinstance(answer, Answer) and isinstance(want, Answer) and answer.ids == want.ids
            got, there = (np.frombuffer(one.log_probs, "<f4") for one in (answer, want))
            assert np.allclose(got, there, atol=1e-4), plan
            teacher.until_logged(" took ")  # the node tells of its answers, and the command looks, every so often
            teacher.process.send_signal(signal.SIGINT)
            teacher.until(r"^\d+ answers?, each a row of 23 tokens:$")
            teacher.until(r"predicted +measured +measured is")
            code, said = teacher.wait()
    assert code == 0 and "Traceback" not in said, said
    assert re.search(r"\d+ answers? took \S+ s each, predicted \S+ s \(\S+ %\), for a row of 23 tokens", said), said
