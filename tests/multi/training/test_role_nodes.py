"""Nodes of one cluster teach and sample for a run, two of them with one teacher and two with one student, and die in
the middle of it: nothing of what is learned changes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.families import save_model
from tests.support.training.opened_run import training
from tests.support.training.post_training.distilled_task import on_policy_job, write_models
from tests.support.training.post_training.policy_task import CHARACTERS, grpo, policy_job, write_task, write_tokenizer
from tests.support.training.runs import final, records, saved, train
from tests.support.training.training_step import furthest
from tests.unit.training.reward_models.test_reward_model import write_reward_model
from tllm.cluster.certificates import Authority
from tllm.cluster.tls import data_client
from tllm.core.errors import LinkError
from tllm.node.coordinator.status_report import report
from tllm.node.train.training_run import TrainingRun
from tllm.training.job.job import Job
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.run_connection import RunConnection
from tllm.training.report.events import RunEvent, RunLostRank, RunStepped
from tllm.training.rollout_servers.rollout_messages import SAMPLING

SECRET = bytes(range(32))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch


def job_of(folder: Path, name: str, **nodes: Any) -> Job:
    keys: dict[str, Any] = dict(max_steps=5000, save_steps=10_000, lr_scheduler_type="constant")
    return on_policy_job(folder, folder / name, mirror_steps=1, distill=nodes, **keys)


def roles(run: TrainingRun) -> dict[str, str]:
    """The role that each node has beside the plan, and answers in, as `tllm status` is told it."""
    return {node["node"]: node["role"] for node in report(run.state)["nodes"] if node["phase"] in ("ready", "done")}


def ask_as(asking: str, run: TrainingRun, asked: str) -> None:
    """Open a session at a node that samples, as one that has another node's certificate."""
    member = run.state.member(asked)
    assert member is not None
    place = AnswererPlace(asked, (member.facts.host, member.answers_at), asked)
    RunConnection.dial(SAMPLING, place, data_client(Authority.of_secret(SECRET).identity(asking))).close()


HAVE = {"local-0": "", "local-1": "rollout", "local-2": "teacher", "local-3": "teacher", "local-4": "rollout"}


async def follow(job: Job, killed: dict[int, str]) -> list[RunEvent]:
    """The news of a run in which a node is killed after each of some steps, until all are back."""
    news: list[RunEvent] = []
    async with training(job, "pp=1", threads=1, on_loss="replan", secret=SECRET) as run:
        assert roles(run) == HAVE
        with pytest.raises(LinkError, match="local-2 asks a rollout server of this cluster, which answers local-0"):
            await asyncio.to_thread(ask_as, "local-2", run, "local-1")
        async for one in run.events():
            news.append(one)
            if isinstance(one, RunStepped) and (node := killed.pop(one.record.step, None)) is not None:
                member = run.state.member(node)
                assert member is not None
                os.kill(member.facts.pid, signal.SIGKILL)
            lost = [at for at, other in enumerate(news) if isinstance(other, RunLostRank)]
            after = [other for other in news[lost[-1] :] if isinstance(other, RunStepped)] if lost else []
            if len(after) >= 2 and roles(run) == HAVE:  # who came again has it again
                run.stop()
    return news


def test_nodes_with_roles_die_and_the_weights_are_those_of_the_colocated_run(tmp_path: Path) -> None:
    write_models(tmp_path)
    two = dict(teacher_nodes=("local-2", "local-3"), teacher_plan="pp=2")  # of which the first answers
    job = job_of(tmp_path, "apart", **two, rollout_nodes=("local-1", "local-4"), rollout_plan="tp=2")
    news = asyncio.run(follow(job, {1: "local-4", 2: "local-3", 5: "local-2", 8: "local-0"}))
    steps = [one.record.step for one in news if isinstance(one, RunStepped)][-1]
    train(replace(job_of(tmp_path, "calm"), mirror_steps=0, max_steps=steps), "pp=1")
    assert [one.node for one in news if isinstance(one, RunLostRank)] == ["local-0"], "the others interrupt nothing"
    assert sum((one.metrics or {}).get("rollout/weight_bytes", 0.0) for one in records(news)) > 0
    off, where = furthest(saved(tmp_path / "apart", steps), final(tmp_path / "calm"))
    assert off < 1e-11, where


KILLS = """

import os
from pathlib import Path


def kills(completions, **columns):
    \"\"\"Says nothing; but kills whose process a file names, after a step's completions are sampled.\"\"\"
    file = Path({file!r})
    if file.exists():
        os.kill(int(file.read_text()), 9)
        file.unlink()
    return [None] * len(completions)
"""


@pytest.mark.soak
def test_a_node_that_scores_dies_and_the_weights_are_those_of_the_model_beside_the_trainer(tmp_path: Path) -> None:
    """In the middle of a step, once while another is there that is named too, and once while nobody is: the run waits
    for one that comes."""
    write_task(tmp_path)
    file = tmp_path / "pid"
    with (tmp_path / "rewards.py").open("a") as rewards:
        rewards.write(KILLS.format(file=str(file)))
    write_reward_model(tmp_path / "reward")
    functions = tuple(f"{tmp_path / 'rewards.py'}:{name}" for name in ("closeness", "kills"))
    keys = dict(reward_model_name_or_path=str(tmp_path / "reward"), reward_funcs=functions)
    save_model("llama", tmp_path / "model", vocab_size=len(CHARACTERS) + 1, eos_token_id=0, bos_token_id=None)
    write_tokenizer(tmp_path / "model")
    model = dict(model_name_or_path=str(tmp_path / "model"), config_name=None, tokenizer_name=None)
    fields: dict[str, Any] = dict(dtype="float64", max_steps=8, **model)
    train(policy_job(tmp_path, tmp_path / "calm", grpo(tmp_path, **keys), **fields), "pp=1")
    for name, nodes, killed in (
        ("two", ("local-1", "local-2"), {1: "local-1", 3: "local-2"}),
        ("one", ("local-1",), {2: "local-1"}),
    ):
        job = policy_job(tmp_path, tmp_path / name, grpo(tmp_path, **keys, reward_nodes=nodes), **fields)
        asyncio.run(score(job, dict(killed), nodes, file))
        mine, others = final(tmp_path / name), final(tmp_path / "calm")
        off, where = furthest(mine, others)
        assert off < 1e-11, where


async def score(job: Job, killed: dict[int, str], nodes: tuple[str, ...], file: Path) -> None:
    """A run in which a node is killed in the step after each of some."""
    async with training(job, "pp=1", threads=1, on_loss="replan") as run:
        assert roles(run) == {"local-0": "", **dict.fromkeys(nodes, "reward")}
        async for one in run.events():
            assert not isinstance(one, RunLostRank), "it interrupts nothing"
            if isinstance(one, RunStepped) and (node := killed.pop(one.record.step, None)) is not None:
                member = run.state.member(node)
                assert member is not None
                (file.with_name("new")).write_text(str(member.facts.pid))
                file.with_name("new").rename(file)
        assert not killed and not file.exists(), "each was killed"
