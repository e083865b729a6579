"""Rows of completions: which tokens are predicted, which completions are kept, and what is written down of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tllm.core.errors import ConfigError
from tllm.training.data.encoder import IGNORED
from tllm.training.data.prompt_batches import PromptRow
from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import RejectionConfig
from tllm.training.objectives.policy_gradient import ADVANTAGE, SAMPLED
from tllm.training.policy.completion_rewards import CompletionRewards
from tllm.training.policy.completions_file import CompletionsFile
from tllm.training.policy.rewarded_rows import RewardedGroup, RewardedRows, best_rows, completion_row
from tllm.training.policy.rollouts import Completion, completion_seed
from tllm.training.tools.user_functions import UserModules

A = 12
"""The token `a` of the task."""


def test_a_row_predicts_the_completion_and_nothing_of_the_prompt() -> None:
    row = completion_row((5, 6, 7), Completion((8, 9), (-0.5, -0.25), False), advantage=1.5, weight=1.0)
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9] and row.lengths == (5,)
    assert row.labels.tolist() == [IGNORED, IGNORED, 8, 9, IGNORED]
    assert row.of_tokens[SAMPLED].tolist() == [0, 0, -0.5, -0.25, 0] and row.of_documents[ADVANTAGE].tolist() == [1.5]
    assert row.weight == 1.0
    hidden = completion_row((5, 6, 7), Completion((8, 9), (-0.5, -0.25), True), is_learned=False)
    assert set(hidden.labels.tolist()) == {IGNORED} and hidden.weight == 0.0


def group_of(rewards: list[float], truncated: list[bool]) -> RewardedGroup:
    completions = [Completion((number + 1,), (-1.0,), cut) for number, cut in enumerate(truncated)]
    prompts, texts = [PromptRow((3,), {})] * len(rewards), ["x"] * len(rewards)
    return RewardedGroup(prompts, completions, texts, np.array([rewards]).T, np.array(rewards), None)


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, [2]),
        ({"keep": 3}, [2, 4, 1]),
        ({"keep": 2, "mask_truncated_completions": True}, [4, 1]),
        ({"keep": 4, "threshold": 0.5}, [2, 4]),
        ({"keep": 4, "threshold": 2.0}, []),
    ],
)
def test_the_best_completions_are_kept_the_first_of_equals_first(keys: dict[str, Any], kept: list[int]) -> None:
    config = RejectionConfig(reward_funcs=("r:f",), num_generations=4, **keys)
    group = group_of([0.25, 1.0, 0.0, 1.0], [False, True, False, False])
    assert [int(row.input_ids[-1]) for row in best_rows(group, config)] == kept


def opened(job: Job) -> RewardedRows:
    initial = open_initial_model(job)
    assert job.rollouts is not None
    rewards = CompletionRewards(job.rollouts, initial.reply_tokenizer, UserModules())
    rows = RewardedRows(job, initial.prompts(job), rewards)
    rows.prepare(0)
    return rows


def answers(rows: RewardedRows, count: int) -> list[Completion]:
    """As many `a` as each prompt asks for, but one more in every second completion, which is cut off."""
    return [
        Completion((A,) * (int(columns["count"]) + number % 2) + (0,) * (1 - number % 2), (-1.0,) * 9, number % 2 == 1)
        for columns in [row.columns for row in rows._started[0].rows_N[::count]]
        for number in range(count)
    ]


def trimmed(completions: list[Completion]) -> list[Completion]:
    return [Completion(one.ids, one.log_probs[: len(one.ids)], one.is_truncated) for one in completions]


@pytest.mark.parametrize(("loss_type", "weight"), [("grpo", 16.0), ("dr_grpo", 16 * 8.0), ("dapo", None)])
def test_a_steps_denominator_is_that_of_its_loss(loss_type: str, weight: float | None, tmp_path: Path) -> None:
    write_task(tmp_path)
    names = tuple(f"{tmp_path / 'rewards.py'}:{name}" for name in ("correct", "closeness"))
    table = grpo(tmp_path, reward_funcs=names, reward_weights=(1.0, 0.5), loss_type=loss_type)
    rows = opened(policy_job(tmp_path, tmp_path / "run", table))
    groups = rows.groups(0)
    assert len(groups) == 4 and len({seed for group in groups for seed in group.seeds}) == 16
    assert groups[1].seeds[2] == completion_seed(42, 0, 1, 2)
    completions = trimmed(answers(rows, 4))
    learned, metrics = rows.learned(0, completions)
    tokens = sum(len(one.ids) for one in completions)
    assert sum(row.weight for row in learned) == (tokens if weight is None else weight)
    assert metrics["rewards/correct/mean"] == 0.5 and metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rewards/closeness/mean"] == 1 - 1 / 16 and metrics["reward"] == 0.5 + 0.5 * (1 - 1 / 16)
    advantage = [float(row.of_documents[ADVANTAGE][0]) for row in learned]
    assert advantage[0] > 0 > advantage[1] and abs(sum(advantage)) < 1e-12
    rows.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and lines[0]["step"] == 1 and lines[0]["rewards"]["correct"] == 1.0
    assert lines[0]["completion"] == "a" * int(lines[0]["prompt"][0]) and [one["truncated"] for one in lines][:2] == [
        False,
        True,
    ]


def test_rewards_that_are_all_one_have_no_deviation(tmp_path: Path) -> None:
    """Six times 0.7 have a mean that is rounded."""
    write_task(tmp_path)
    rows = opened(policy_job(tmp_path, tmp_path / "run", grpo(tmp_path)))
    reward_PG = np.array([[0.7] * 6, [0.7] * 5 + [0.8]])
    completions = [Completion((A, 0), (-1.0, -1.0), False)] * 12
    metrics = rows._rewards.metrics(completions, reward_PG.reshape(-1, 1), reward_PG)
    assert metrics["frac_reward_zero_std"] == 0.5
    rows.close()


def test_truncated_completions_are_hidden_and_still_compared_with(tmp_path: Path) -> None:
    write_task(tmp_path)
    plain, masked = (
        opened(policy_job(tmp_path, tmp_path / f"run-{hides}", grpo(tmp_path, mask_truncated_completions=hides)))
        for hides in (False, True)
    )
    found = []
    for rows in (plain, masked):
        rows.groups(0)
        found.append(rows.learned(0, trimmed(answers(rows, 4)))[0])
        rows.close()
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert one.of_documents[ADVANTAGE] == other.of_documents[ADVANTAGE]
        assert (one.labels == other.labels).all() == (number % 2 == 0)


def test_a_completion_of_which_nothing_is_said_ends_the_run(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "def closeness(completions, **columns):\n    return [None] * len(completions)\n"
    )
    rows = opened(policy_job(tmp_path, tmp_path / "run"))
    rows.groups(0)
    with pytest.raises(ConfigError, match="no reward function says anything of completion 0: all of closeness"):
        rows.learned(0, trimmed(answers(rows, 4)))


def test_the_file_of_completions_forgets_steps_that_are_taken_again(tmp_path: Path) -> None:
    record = CompletionRecord(step=1, prompt="1=", completion="a", rewards={"f": None}, reward=0.0)
    file = CompletionsFile(tmp_path, 0)
    for step in (1, 1, 2, 3):
        file.write([replace_step(record, step)])
    file.close()
    with (tmp_path / "completions.jsonl").open("ab") as torn:
        torn.write(b'{"step":3,"pro')
    again = CompletionsFile(tmp_path, 2)
    again.write([replace_step(record, 3)])
    again.close()
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 3]


def replace_step(record: CompletionRecord, step: int) -> CompletionRecord:
    return CompletionRecord(**{**{name: getattr(record, name) for name in record.__struct_fields__}, "step": step})
