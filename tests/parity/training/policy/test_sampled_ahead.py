"""Steps sampled ahead: each with the weights that its number says, whoever samples and wherever a run stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.training.policy.test_remote_rollouts import ComesLater, HangsUp
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.post_training.told_runs import Told, check_same_steps, told
from tests.support.training.runs import final, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.node.roles.rollout_model import RolloutModel
from tllm.training.job.job import Job
from tllm.training.objectives.rollout_correction import CLIPPED, RATIO
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.policy.rollouts import completion_seed
from tllm.training.questions.question_server import Session
from tllm.training.rollout_servers.gathered_weights import GatheredWeights
from tllm.training.rollout_servers.remote_rollouts import METRICS
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer, RolloutQuestion, RolloutRun
from tllm.training.rollout_servers.sampled_ahead import STALENESS
from tllm.training.rollout_servers.weight_chunks import ChunkTable
from tllm.training.trainer import RankTrainer

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


def job_of(
    task: Path, run: Path, servers: Sequence[str], secret: Path, table: dict[str, Any] | None = None, **more: Any
) -> Job:
    elsewhere = dict(rollout_servers=tuple(servers), rollout_secret=str(secret), num_completions_to_print=64)
    fields = {"dtype": "float64", "max_steps": STEPS, "save_steps": 100, **more}
    return policy_job(task, run, grpo(task, **{"max_staleness": 1, **elsewhere, **(table or {})}), **fields)


def check_same(got: Told, want: Told, is_exact: bool = False) -> None:
    """The same run, but for what is told of servers."""
    assert got[2] == want[2], "the same completions"
    if is_exact:
        assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])
    check_same_steps(got[0], want[0], but=METRICS)
    off, where = furthest(got[1], want[1])
    assert off < 1e-11, where


@pytest.fixture(scope="module")
def calm(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One server, one process, never broken off."""
    folder = tmp_path_factory.mktemp("calm")
    with sampling(task, folder / "key") as one:
        return told(job_of(task, folder / "run", [address_of(one)], folder / "key"), "pp=1")


@dataclass
class Watched:
    """A model whose sessions note which weights each step is sampled with, and take their time."""

    served: RolloutModel
    seconds: float = 0.0
    roots: dict[int, set[bytes]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.served.name

    def open_session(self, run: RolloutRun) -> Session[RolloutQuestion, RolloutAnswer]:
        session = self.served.open_session(run)
        inner = session.answer
        steps = {completion_seed(42, step, place, 0): step for step in range(10) for place in range(4)}

        def answer(question: RolloutQuestion) -> RolloutAnswer:
            if isinstance(question, PromptGroups):
                time.sleep(self.seconds)
                self.roots.setdefault(steps[question.groups[0].seeds[0]], set()).add(question.root)
            return inner(question)

        session.answer = answer  # type: ignore[method-assign]
        return session


def note_roots(found: dict[int, bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[[RankTrainer], None]:
    """Of the weights that each step begins with."""

    def damage(trainer: RankTrainer) -> None:
        step = trainer.train_step

        def train_step(*arguments: Any) -> bool:
            gathered = GatheredWeights(trainer.config.groups.replica, trainer._model.trained)
            gathered.gather(tensors := gathered.room())
            table = ChunkTable.of(tensors)
            found[trainer._step] = table.root(table.hashes(tensors))
            return step(*arguments)

        monkeypatch.setattr(trainer, "train_step", train_step)

    return damage


@pytest.mark.parametrize(("ahead", "passes", "steps"), [(1, 1, 4), (2, 1, 5), (2, 2, 6)])
def test_a_step_is_sampled_with_the_weights_that_its_number_says(
    ahead: int, passes: int, steps: int, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, watched, roots = tmp_path / "key", Watched(RolloutModel.open(str(task))), dict[int, bytes]()
    with sampling(task, secret, watched) as one:
        table = dict(max_staleness=ahead, num_iterations=passes)
        job = job_of(task, tmp_path / "run", [address_of(one)], secret, table, max_steps=steps)
        train(job, "pp=1", damage=note_roots(roots, monkeypatch))
    assert len(set(roots.values())) == steps, "every step moves the weights"
    assert watched.roots == {step: {roots[max(0, step - ahead)]} for step in range(0, steps, passes)}


def test_what_was_sampled_with_is_corrected_for_and_told(calm: Told, task: Path, tmp_path: Path) -> None:
    metrics = [record.metrics or {} for record in calm[0]]
    assert [one[STALENESS] for one in metrics] == [0, 1, 1, 1]
    assert abs(metrics[0][f"{RATIO}/max"] - 1) < 1e-9 and all(one[f"{RATIO}/max"] > 1.001 for one in metrics[1:])
    assert all(0 <= one[CLIPPED] < 1 and one["rollout/server_seconds"] > 0 for one in metrics)
    secret = tmp_path / "key"
    with sampling(task, secret) as one:
        table = dict(rollout_importance_sampling_correction=False)
        plain = told(job_of(task, tmp_path / "run", [address_of(one)], secret, table), "pp=1")
    off = [abs(a.loss - b.loss) for a, b in zip(plain[0], calm[0], strict=True)]
    assert off[0] < 1e-12 and off[1] > 1e-9, "the first step has ratios of 1"


def test_a_server_that_is_lost_while_it_samples_ahead_changes_nothing(calm: Told, task: Path, tmp_path: Path) -> None:
    """Nor do a second server, another plan, and servers that are slower than the trainer."""
    secret, dying = tmp_path / "key", HangsUp(RolloutModel.open(str(task)))
    slow = Watched(RolloutModel.open(str(task)), seconds=0.2)
    later = ComesLater(slow, dying)
    with sampling(task, secret, later) as one, sampling(task, secret, dying) as two:
        dying.servers.append(two)
        got = told(job_of(task, tmp_path / "run", [address_of(one), address_of(two)], secret), "dp=2")
    check_same(got, calm)
    again = [(record.metrics or {})["rollout/questions_asked_again"] for record in got[0]]
    assert len(dying.asked) >= 2 and sum(again) >= 1, "it was lost while it sampled"


def test_a_run_that_is_stopped_after_every_step_has_the_same_bits(task: Path, tmp_path: Path) -> None:
    """What was sampled ahead is in the save: weights that are gone are not needed again."""
    secret, keys = tmp_path / "key", dict[str, Any](dtype="float32", deterministic=True, max_steps=5)
    with sampling(task, secret) as one, sampling(task, secret) as two:
        servers = [address_of(one), address_of(two)]
        table = dict(max_staleness=2)
        want = told(job_of(task, tmp_path / "calm", servers, secret, table, **keys), "pp=1")
        job = job_of(task, tmp_path / "run", servers[:1], secret, table, **keys)
        for plan in ("pp=1", "dp=2", "pp=1", "dp=2,zero=1"):
            train(job, plan, lambda: True)
        got = told(job, "pp=1")
    assert got[2] == want[2] and all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def test_a_reward_that_fails_is_a_fault_of_its_own_step(calm: Told, task: Path, tmp_path: Path) -> None:
    """The step before is saved, with completions of the one that failed and of the next; the run goes on from there."""
    calls = tmp_path / "calls"
    (tmp_path / "rewards.py").write_text(
        (task / "rewards.py").read_text().replace("def closeness", "def closest")
        + f"""

def closeness(**columns):
    with open({str(calls)!r}, "a+") as file:
        file.write("x")
        file.flush()
        if file.seek(0) == 0 and len(file.read()) == 3:
            raise ValueError("of the third step")
    return closest(**columns)
"""
    )
    secret, table = tmp_path / "key", dict(reward_funcs=(f"{tmp_path / 'rewards.py'}:closeness",))
    with sampling(task, secret) as one:
        job = job_of(task, tmp_path / "run", [address_of(one)], secret, table)
        with pytest.raises(ConfigError, match="of the third step"):
            train(job, "dp=2")
        assert (tmp_path / "run" / "step-2").is_dir(), "the steps before are saved"
        train(job, "pp=1")
    off, where = furthest(final(tmp_path / "run"), calm[1])
    assert off < 1e-11 and (tmp_path / "run" / COMPLETIONS).read_text() == calm[2], where
