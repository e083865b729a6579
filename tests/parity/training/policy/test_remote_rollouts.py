"""Rollouts apart: servers elsewhere sample what every plan would, and one that is lost costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.post_training.rollout_servers import RolloutAnswerer, RolloutServer, cut, sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.post_training.told_runs import Told, check_same_run, told
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.node.roles.rollout_model import RolloutModel
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.questions import remote_answerer
from tllm.training.questions.question_server import Session
from tllm.training.report.events import RunEnded
from tllm.training.report.metrics import StepRecord
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer, RolloutQuestion, RolloutRun
from tllm.training.trainer import RankTrainer

PLANS = ("pp=1", "dp=2,zero=2", "pp=2,tp=1+2", "tp=2,schedule=1f1b")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


def job_of(task: Path, run: Path, servers: Sequence[str] = (), secret: Path | None = None, **more: Any) -> Job:
    """With a reference and two steps on the same completions; sampled here, or by servers."""
    elsewhere = {"rollout_servers": tuple(servers), "rollout_secret": str(secret)} if servers else {}
    return policy_job(task, run, grpo(task, beta=0.1, num_iterations=2, **elsewhere), **more)


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told(job_of(task, tmp_path_factory.mktemp("alone") / "run", dtype="float64"), "pp=1")


@dataclass
class HangsUp:
    """A model whose server ends its connections, as a process that dies, while it samples the second prompts."""

    served: RolloutModel
    servers: list[RolloutServer] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    twice: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return self.served.name

    def open_session(self, run: RolloutRun) -> Session[RolloutQuestion, RolloutAnswer]:
        return HangingUp(self.served.open_session(run), self)


@dataclass
class HangingUp:
    """A session of `HangsUp`."""

    inner: Session[RolloutQuestion, RolloutAnswer]
    of: HangsUp

    def answer(self, question: RolloutQuestion) -> RolloutAnswer:
        if isinstance(question, PromptGroups):
            self.of.asked.append(question.number)
            if len(self.of.asked) == 2:
                self.of.twice.set()
                hang_up(self.of.servers[0])
        return self.inner.answer(question)

    def failed(self, question: RolloutQuestion, reason: str) -> RolloutAnswer:
        return self.inner.failed(question, reason)

    def close(self) -> None:
        self.inner.close()


@dataclass
class ComesLater:
    """A model whose server takes up a run once the other's was asked for its second prompts: else it might sample all,
    where the other is held up."""

    served: RolloutAnswerer
    other: HangsUp

    @property
    def name(self) -> str:
        return self.served.name

    def open_session(self, run: RolloutRun) -> Session[RolloutQuestion, RolloutAnswer]:
        assert self.other.twice.wait(40)
        return self.served.open_session(run)


def hang_up(server: RolloutServer) -> None:
    for connection in list(server._runs):
        connection.close()


@pytest.mark.parametrize("plan", PLANS)
def test_servers_sample_what_every_plan_would(plan: str, task: Path, alone: Told, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    with sampling(task, secret) as one, sampling(task, secret) as two:
        job = job_of(task, tmp_path / "run", [address_of(one), address_of(two)], secret, dtype="float64")
        got = told(job, plan)
    check_same_run(got, alone)
    parameters = sum(tensor.nbytes for tensor in alone[1].values())
    first, _, third, _ = (record.metrics or {} for record in got[0])
    # Random weights travel once to each server that is asked: one may be done before the other is reached.
    assert 0.9 * parameters < first["rollout/weight_bytes"] < 2.2 * parameters
    assert first["rollout/changed_weight_ratio"] == 1 and 0 < third["rollout/changed_weight_ratio"] <= 1
    assert third["rollout/completion_bytes"] > 0


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,tp=1+2"])
def test_ranks_that_hold_one_model_together_sample_what_one_would(
    plan: str, task: Path, alone: Told, tmp_path: Path
) -> None:
    with cut(task, plan) as model, sampling(task, tmp_path / "key", model) as one:
        got = told(job_of(task, tmp_path / "run", [address_of(one)], tmp_path / "key", dtype="float64"), "pp=1")
    check_same_run(got, alone)
    parameters = sum(tensor.nbytes for tensor in alone[1].values())
    sent = [(record.metrics or {}).get("rollout/weight_bytes", 0) for record in got[0]]
    assert 0.9 * parameters < sent[0] < 1.1 * parameters, "to the first rank alone"


@pytest.mark.parametrize("plan", ["pp=1", "dp=2"])
def test_what_a_lost_server_was_asked_others_sample(plan: str, task: Path, alone: Told, tmp_path: Path) -> None:
    secret, dying = tmp_path / "key", HangsUp(RolloutModel.open(str(task)))
    later = ComesLater(RolloutModel.open(str(task)), dying)
    with sampling(task, secret, later) as one, sampling(task, secret, dying) as two:
        dying.servers.append(two)
        job = job_of(task, tmp_path / "run", [address_of(one), address_of(two)], secret, dtype="float64")
        got = told(job, plan)
    check_same_run(got, alone)
    again = [(record.metrics or {})["rollout/questions_asked_again"] for record in got[0]]
    assert len(dying.asked) >= 2 and sum(again) >= 1, "it was lost while it sampled"


def test_a_deterministic_run_is_the_colocated_one_to_the_bit(task: Path, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    want = told(job_of(task, tmp_path / "alone", deterministic=True), "pp=1")
    with sampling(task, secret) as one, sampling(task, secret) as two, sampling(task, secret) as three:
        servers = [address_of(server) for server in (one, two, three)]
        got = told(job_of(task, tmp_path / "run", servers, secret, deterministic=True), "dp=2,zero=1")
    assert got[2] == want[2] and [one.loss for one in got[0]] == [one.loss for one in want[0]]
    assert all(torch.equal(want[1][name], got[1][name]) for name in want[1])


def test_a_run_that_goes_on_with_other_servers_is_one_that_never_stopped(
    task: Path, alone: Told, tmp_path: Path
) -> None:
    secret, run = tmp_path / "key", tmp_path / "run"
    with sampling(task, secret) as one:
        train(job_of(task, run, [address_of(one)], secret, dtype="float64"), "dp=2", lambda: True)
    with sampling(task, secret) as two, sampling(task, secret) as three:
        train(job_of(task, run, [address_of(two), address_of(three)], secret, dtype="float64"), "pp=1")
    off, where = furthest(final(run), alone[1])
    assert off < 1e-11 and (run / COMPLETIONS).read_text() == alone[2], where


def metric(record: StepRecord, name: str) -> float:
    return (record.metrics or {})[f"rollout/{name}"]


@pytest.fixture(scope="module")
def base(task: Path) -> Path:
    """A model that has learned for a moment, as adapters begin from a folder."""
    train(policy_job(task, task / "base", max_steps=2), "pp=1")
    return task / "base" / "final"


def begun(base: Path) -> dict[str, Any]:
    return dict(config_name=None, tokenizer_name=None, model_name_or_path=str(base), learning_rate=0.05)


def test_only_what_changed_travels(task: Path, base: Path, tmp_path: Path) -> None:
    """What the server has from its own folder at first, and nothing where nothing is learned."""
    secret, hashes = tmp_path / "key", 32 * 30
    for rate in (0.0, 0.05):
        with sampling(base, secret) as one:
            more = {**begun(base), "learning_rate": rate}
            job = job_of(task, tmp_path / f"run-{rate}", [address_of(one)], secret, dtype="bfloat16", **more)
            got = records(train(job, "pp=1"))
        assert metric(got[0], "weight_bytes") < hashes + 500, "its folder has what the run begins with"
        assert (metric(got[2], "changed_weight_ratio") > 0) == (rate > 0)
        assert (metric(got[2], "weight_bytes") > hashes + 500) == (rate > 0)


@pytest.mark.parametrize(("dtype", "quantize"), [("float64", "none"), ("float32", "int8")])
def test_of_an_adapter_only_the_adapter_travels(
    dtype: str, quantize: str, task: Path, base: Path, tmp_path: Path
) -> None:
    secret, lora = tmp_path / "key", LoraJob(r=4, lora_alpha=8.0, quantize=quantize)
    more: dict[str, Any] = dict(dtype=dtype, lora=lora, **begun(base))
    want = records(train(job_of(task, tmp_path / "alone", **more), "pp=1"))
    divided = cut(base, "tp=2" if dtype == "float64" else "pp=2")
    with divided as model, sampling(base, secret) as one, sampling(base, secret, model) as two:
        servers = [address_of(one), address_of(two)]
        got = records(train(job_of(task, tmp_path / "run", servers, secret, **more), "dp=2"))
    limit = 1e-9 if dtype == "float64" else 1e-6
    assert (tmp_path / "run" / COMPLETIONS).read_text() == (tmp_path / "alone" / COMPLETIONS).read_text()
    assert max(abs(a.loss - b.loss) for a, b in zip(got, want, strict=True)) < limit
    name = "final/adapter_model.safetensors"
    adapter = load_file(tmp_path / "run" / name)
    off, where = furthest(adapter, load_file(tmp_path / "alone" / name))
    assert off < 10 * limit, where
    wide = 8 if dtype == "float64" else 4
    numbers = sum(tensor.numel() for tensor in adapter.values())
    # To two servers, or to one that is done before the other is reached; zeros may be in new memory already.
    assert wide * numbers / 2 < metric(got[0], "weight_bytes") < 2 * wide * numbers + 12_000


def after_two_steps(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Callable[[RankTrainer], None]:
    """What rank 0 does once, after its second step."""
    acts = [act]

    def damage(trainer: RankTrainer) -> None:
        step = trainer.train_step

        def train_step(*arguments: Any) -> bool:
            found = step(*arguments)
            if trainer.config.rank == 0 and acts and trainer._step == 2:
                acts.pop()()
            return found

        monkeypatch.setattr(trainer, "train_step", train_step)

    return damage


def test_servers_that_are_lost_for_good_cost_no_step(
    task: Path, alone: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_answerer, "LOOK_SECONDS", 0.05)
    lost_seconds = remote_answerer.LOST_SECONDS
    secret, run = tmp_path / "key", tmp_path / "run"
    with sampling(task, secret) as one:
        job = job_of(task, run, [address_of(one)], secret, dtype="float64", save_steps=4)

        def lose() -> None:
            one.close()
            monkeypatch.setattr(remote_answerer, "LOST_SECONDS", 0.5)

        damage = after_two_steps(lose, monkeypatch)
        with pytest.raises(ConfigError, match=rf"rollout servers {address_of(one)} \(.*none could be reached"):
            train(job, "dp=2", damage=damage)
    assert (run / "step-2").is_dir(), "the steps before are saved"
    monkeypatch.setattr(remote_answerer, "LOST_SECONDS", lost_seconds)
    with sampling(task, secret) as two:
        train(job_of(task, run, [address_of(two)], secret, dtype="float64"), "pp=1")
    off, where = furthest(final(run), alone[1])
    assert off < 1e-11, where


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_waits_for_lost_servers_ends_when_it_is_stopped(
    max_staleness: int, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, on all ranks, without an error; the steps before are saved, and the same run goes on from there."""
    secret, run, stopped, began = tmp_path / "key", tmp_path / "run", threading.Event(), list[float]()
    keys: dict[str, Any] = dict(dtype="float64", save_steps=4, max_steps=8)

    def job_at(server: RolloutServer) -> Job:
        apart = dict(rollout_servers=(address_of(server),), rollout_secret=str(secret), max_staleness=max_staleness)
        return policy_job(task, run, grpo(task, num_generations=4, **apart), **keys)

    with sampling(task, secret) as one:

        def lose() -> None:
            one.close()

            def stop() -> None:
                began.append(time.monotonic())
                stopped.set()

            threading.Timer(1.0, stop).start()  # it waits by then

        news = train(job_at(one), "dp=2", stopped.is_set, damage=after_two_steps(lose, monkeypatch))
    assert time.monotonic() - began[0] < 30, "it does not wait for the servers"
    ended = news[-1]
    assert isinstance(ended, RunEnded) and not ended.final
    steps = len(records(news))
    # Of the steps that are sampled ahead the server has answered for none, for some or for all when it is lost.
    assert 2 <= steps <= 2 + max_staleness and (run / f"step-{steps}").is_dir()
    with sampling(task, secret) as two:
        assert len(records(train(job_at(two), "pp=1"))) == 8 - steps


def test_evaluations_are_sampled_apart_too(task: Path, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    more: dict[str, Any] = {"eval_files": (str(task / "prompts.jsonl"),), "eval_steps": 2}
    want = records(train(job_of(task, tmp_path / "alone", dtype="float64", **more), "pp=1"))
    with sampling(task, secret) as one:
        job = job_of(task, tmp_path / "run", [address_of(one)], secret, dtype="float64", **more)
        got = records(train(job, "dp=2"))
    told = [(record.eval_metrics or {}) for record in (*got, *want) if record.eval_metrics]
    assert len(told) == 4 and told[:2] == told[2:]
