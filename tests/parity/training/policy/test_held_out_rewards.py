"""Rewards of prompts held out: the same under every plan, nothing learned from them, and a run's judge if asked for."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.training.policy.test_policy_runs import JOBS, WRONG, grpo_job, rejection_job
from tests.support.selection import pairs_in_turn, soak_but
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.post_training.told_runs import Told, told
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination
from tllm.training.job.initial_model import spec_of
from tllm.training.job.job import Job
from tllm.training.policy.completions_file import COMPLETIONS, EVAL_COMPLETIONS
from tllm.training.report.events import TOLD_COMPLETIONS, RunEnded, RunStepped
from tllm.training.report.metrics import read_records

PLANS = ("dp=5", "pp=2", "dp=2,zero=2,recompute=layer", "tp=2", "dp=2,pp=2,tp=2,zero=1,schedule=zero_bubble")
HELD_OUT = range(4, 11)
"""Counts of the prompts: more than a step has, so that an evaluation asks twice."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_held_out(folder)
    return folder


def write_held_out(folder: Path) -> None:
    write_task(folder)
    rows = ({"prompt": f"{count}=", "count": count} for count in HELD_OUT)
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def held_out(task: Path, **more: Any) -> dict[str, Any]:
    return {"eval_files": (str(task / "held_out.jsonl"),), "eval_steps": 2, **more}


def written(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVAL_COMPLETIONS).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Told, Path]]:
    """Each task's run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: (told(job(task, folder / name, **held_out(task)), "pp=1"), folder / name) for name, job in JOBS.items()
    }


@pytest.mark.parametrize(("name", "plan"), pairs_in_turn(JOBS, PLANS, 1))
def test_every_plan_is_one_process(
    plan: str, name: str, task: Path, alone: dict[str, tuple[Told, Path]], tmp_path: Path
) -> None:
    (want, _, completions), run = alone[name]
    got, _, same = told(JOBS[name](task, tmp_path / "run", **held_out(task)), plan)
    assert same == completions
    assert (tmp_path / "run" / EVAL_COMPLETIONS).read_bytes() == (run / EVAL_COMPLETIONS).read_bytes()
    assert [one.eval_metrics is None for one in got] == [True, False, True, False]
    for one, other in zip(got, want, strict=True):
        assert one.eval_loss is None and (one.eval_metrics or {}).keys() == (other.eval_metrics or {}).keys()
        assert all(abs(x - (other.eval_metrics or {})[key]) < 1e-12 for key, x in (one.eval_metrics or {}).items())


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_learned_from_them(
    name: str, task: Path, alone: dict[str, tuple[Told, Path]], tmp_path: Path
) -> None:
    (want, tensors, completions), _ = alone[name]
    got, others, same = told(JOBS[name](task, tmp_path / "run"), "pp=1")
    assert same == completions and [one.loss for one in got] == [one.loss for one in want]
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    assert not (tmp_path / "run" / EVAL_COMPLETIONS).exists()


def test_the_mean_is_that_of_all_completions(task: Path, tmp_path: Path) -> None:
    """All are written here, and rewarded once more by a plain loop; two functions with weights of their own."""
    names = tuple(f"{task / 'rewards.py'}:{name}" for name in ("closeness", "correct"))
    keys: dict[str, Any] = dict(num_generations_eval=3, num_completions_to_print=100, reward_weights=(1.0, 4.0))
    job = policy_job(
        task, tmp_path / "run", grpo(task, reward_funcs=names, **keys), dtype="float64", max_steps=2, **held_out(task)
    )
    news = train(job, "dp=2")
    (metrics,) = [one.eval_metrics for one in records(news) if one.eval_metrics is not None]
    lines = written(tmp_path / "run")
    told = [completion.completion for one in news if isinstance(one, RunStepped) for completion in one.completions]
    assert told == [line["completion"] for line in lines][:TOLD_COMPLETIONS], "who follows the run is told the first"
    assert [line["prompt"] for line in lines] == [f"{count}=" for count in HELD_OUT for _ in range(3)]
    close, right = [], []
    for line in lines:
        text, wanted = line["completion"], int(line["prompt"][:-1])
        close.append(1 - (abs(text.count("a") - wanted) + len(text) - text.count("a")) / 8)
        right.append(float(text == "a" * wanted))
        assert line["rewards"] == {"closeness": close[-1], "correct": right[-1]}
        assert abs(line["reward"] - close[-1] - 4 * right[-1]) < 1e-15 and line["step"] == 2
    assert abs(metrics["rewards/closeness/mean"] - sum(close) / len(close)) < 1e-12
    assert abs(metrics["reward"] - sum(close) / len(close) - 4 * sum(right) / len(right)) < 1e-12


def test_a_model_that_does_not_change_is_worth_the_same_at_each_evaluation(task: Path, tmp_path: Path) -> None:
    """And it gains nothing: the run ends by its patience, with the first of the saves."""
    keys = held_out(task, early_stopping_patience=2, load_best_model_at_end=True, max_steps=12, learning_rate=0.0)
    ended = []
    for number, plan in enumerate(("pp=1", "dp=2")):
        news = train(policy_job(task, tmp_path / str(number), dtype="float64", **keys), plan)
        found = [one.eval_metrics for one in records(news) if one.eval_metrics is not None]
        assert len(found) == 3 and found[0] == found[1] == found[2]
        assert len({line["completion"] for line in written(tmp_path / str(number))[:4]}) > 1, "each has its own seed"
        ended += [(one.step, one.model_step, one.reason) for one in news if isinstance(one, RunEnded)]
    assert ended[0] == ended[1] and ended[0][:2] == (6, 2)
    assert ended[0][2].startswith("2 evaluations without a gain: reward was at its best")


def test_the_best_model_is_that_of_the_greatest_reward(task: Path, tmp_path: Path) -> None:
    job = grpo_job(task, tmp_path / "run", **held_out(task, load_best_model_at_end=True, max_steps=8))
    news = train(job, "dp=2")
    rewards = {one.step: one.eval_metrics["reward"] for one in records(news) if one.eval_metrics is not None}
    (ended,) = [one for one in news if isinstance(one, RunEnded)]
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert ended.model_step == best and f"reward {rewards[best]:.6g}, the best of the saves" in ended.choice


def test_a_run_that_goes_on_has_each_line_once(task: Path, alone: dict[str, tuple[Told, Path]], tmp_path: Path) -> None:
    job, steps = rejection_job(task, tmp_path / "run", **held_out(task)), itertools.count(1)
    train(job, "pp=1", lambda: next(steps) >= 3)
    train(job, "dp=2")
    assert (tmp_path / "run" / EVAL_COMPLETIONS).read_bytes() == (alone["rejection"][1] / EVAL_COMPLETIONS).read_bytes()


@pytest.mark.parametrize("plan", soak_but(["dp=2"], ["pp=1", "dp=2"]))
def test_a_reward_that_goes_wrong_in_an_evaluation_costs_no_step(
    plan: str, alone: dict[str, tuple[Told, Path]], tmp_path: Path
) -> None:
    """The first sampling and the first evaluation's first half are rewarded; its other half is not."""
    folder = tmp_path / "task"
    write_held_out(folder)
    right = (folder / "rewards.py").read_text()
    (folder / "rewards.py").write_text(right + WRONG.replace("len(calls) > 1", "len(calls) > 2"))
    job = grpo_job(folder, tmp_path / "run", **held_out(folder, save_steps=4))
    with pytest.raises(ConfigError, match=r"closeness of rewards\.py raised ValueError: no verdict"):
        train(job, plan)
    assert (tmp_path / "run" / "step-2").is_dir(), "the step that was evaluated is saved"
    assert read_records(tmp_path / "run" / "metrics.jsonl")[-1].eval_metrics is None
    (folder / "rewards.py").write_text(right)
    assert [one.step for one in records(train(job, plan))] == [3, 4]
    off, where = furthest(final(tmp_path / "run"), alone["grpo"][0][1])
    assert off < 1e-11, where


def test_a_prompt_held_out_that_is_too_long_is_named_and_nothing_is_begun(tmp_path: Path) -> None:
    write_held_out(tmp_path / "task")
    with (tmp_path / "task" / "held_out.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "1" * 9 + "=", "count": 1}) + "\n")
    with pytest.raises(ConfigError, match=r"held_out\.jsonl, line 8: the prompt has 10 tokens.* leaves 8"):
        train(grpo_job(tmp_path / "task", tmp_path / "run", **held_out(tmp_path / "task")), "pp=1")
    assert not (tmp_path / "run" / COMPLETIONS).exists()


def check(job: Job) -> None:
    check_combination(job, Plan.parse("pp=1", 2), spec_of(job))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"eval_num_prompts": 2}, "eval_num_prompts is 2 and the evaluations of the task 'grpo' sample completions"),
        ({"early_stopping_patience": 1, "eval_steps": 3}, "eval_steps is 3 and grpo.num_iterations is 2"),
        ({"load_best_model_at_end": True, "eval_steps": 4}, "save_steps is 2 and eval_steps is 4"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(keys: dict[str, Any], says: str, task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        check(grpo_job(task, tmp_path / "run", **held_out(task, **keys)))


def test_a_loss_that_there_is_not_is_refused(task: Path, tmp_path: Path) -> None:
    job = grpo_job(task, tmp_path / "run", **held_out(task, metric_for_best_model="loss"))
    with pytest.raises(ConfigError, match="'loss', which the task 'grpo' does not tell") as caught:
        train(job, "pp=1")
    assert "reward, rewards/closeness/mean" in caught.value.hint
