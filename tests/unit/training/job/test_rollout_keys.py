"""The tables `[grpo]` and `[rejection]`: where their functions are found, and what is refused, by name and number."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tllm.core.errors import ConfigError, PlanError
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination, microbatches_of
from tllm.training.job.initial_model import spec_of
from tllm.training.job.job import decode_job, encode_job
from tllm.training.job.job_file import read_job, write_job
from tllm.training.job.job_parts import is_snapshot_step, snapshot_steps
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig, function_parts

FUNCTIONS = {"reward_funcs": ("rewards:correct",)}
APART = {**FUNCTIONS, "rollout_servers": ("10.0.0.7:7070",)}
JOB = """
task = "grpo"
config_name = "config.json"
train_files = ["prompts.jsonl"]
output_dir = "run"
max_steps = 6

[grpo]
reward_funcs = ["rewards:correct", "deeper.rewards:other"]
epsilon_high = 0.28
tools = ["tools:calculator"]
"""


def test_functions_are_named_from_the_folder_of_the_jobs_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    resolved = read_job(file, ["grpo.beta=0.04", "grpo.reward_weights=1,0.5"])
    table = resolved.job.grpo
    assert table is not None and resolved.job.rollouts is table and table.beta == 0.04
    assert [function_parts(text) for text in table.reward_funcs] == [
        (tmp_path / "rewards.py", "correct"),
        (tmp_path / "deeper" / "rewards.py", "other"),
    ]
    assert [function_parts(text) for text in table.tools] == [(tmp_path / "tools.py", "calculator")]
    assert table.clip_range == (0.8, 1.28) and resolved.origins["grpo.beta"] == "--set"
    again = tmp_path / "elsewhere" / "job.toml"
    again.parent.mkdir()
    again.write_text(write_job(resolved))
    assert read_job(again).job == resolved.job, "what the run's folder keeps names the same functions"
    assert decode_job(encode_job(resolved.job)) == resolved.job


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        (GRPOConfig, {}, "grpo.reward_funcs is empty"),
        (RejectionConfig, {}, "rejection.reward_funcs is empty"),
        (GRPOConfig, {"reward_funcs": ("correct",)}, "reward_funcs names 'correct'"),
        (GRPOConfig, {"reward_funcs": ("a:f", "b:f")}, "two functions of one name: f, f"),
        (GRPOConfig, {**FUNCTIONS, "reward_weights": (1.0, 2.0)}, "2 reward_weights and 1 reward_funcs"),
        (GRPOConfig, {**FUNCTIONS, "reward_weights": (float("nan"),)}, r"grpo\.reward_weights is \(nan,\)"),
        (GRPOConfig, {**FUNCTIONS, "num_generations": 1}, "grpo.num_generations is 1 and must be 2 or more"),
        (GRPOConfig, {**FUNCTIONS, "num_generations_eval": 0}, "grpo.num_generations_eval is 0 and must be 1 or more"),
        (GRPOConfig, {**FUNCTIONS, "temperature": 0.0}, r"grpo.temperature is 0\.0"),
        (GRPOConfig, {**FUNCTIONS, "top_p": 0.0}, r"grpo.top_p is 0\.0"),
        (GRPOConfig, {**FUNCTIONS, "top_p": 1.5}, r"grpo.top_p is 1\.5"),
        (GRPOConfig, {**FUNCTIONS, "loss_type": "dapoo"}, "grpo.loss_type is 'dapoo'"),
        (GRPOConfig, {**FUNCTIONS, "reward_timeout": 600.0}, "must be less than 600"),
        (GRPOConfig, {**FUNCTIONS, "advantage": "rloo"}, "RLOO divides by nothing"),
        (RejectionConfig, {**FUNCTIONS, "keep": 9}, "rejection.keep is 9 and rejection.num_generations is 8"),
        (GRPOConfig, {**FUNCTIONS, "tools": ("calculator",)}, "grpo: tools names 'calculator'"),
        (
            RejectionConfig,
            {**FUNCTIONS, "tools": ("a:f", "b:f")},
            "rejection.tools has two functions of one name: f, f",
        ),
        (GRPOConfig, {**FUNCTIONS, "max_staleness": 1}, "max_staleness is 1 and grpo.rollout_servers and"),
        (GRPOConfig, {**FUNCTIONS, "max_staleness": 1, "rollout_nodes": ("auto",)}, "which may come to none"),
        (GRPOConfig, {**APART, "rollout_plan": "pp=2"}, "rollout_plan is 'pp=2' and grpo.rollout_nodes is left out"),
        (GRPOConfig, {**FUNCTIONS, "rollout_nodes": (2,), "rollout_plan": "dp=2"}, "rollout_plan: plan .* gives dp"),
        (GRPOConfig, {**APART, "max_staleness": -1}, "grpo.max_staleness is -1 and must be 0 or more"),
        (GRPOConfig, {**APART, "max_staleness": 3, "num_iterations": 2}, "3 and grpo.num_iterations is 2"),
        (
            GRPOConfig,
            {**FUNCTIONS, "rollout_importance_sampling_clip_min": 3.0},
            "clip_min is 3.0 and .*clip_max is 3.0",
        ),
        (GRPOConfig, {**FUNCTIONS, "rollout_importance_sampling_mode": "truncate"}, "mode is 'truncate'"),
        (GRPOConfig, {**FUNCTIONS, "max_tool_calling_iterations": 0}, "max_tool_calling_iterations is 0 and must be 1"),
    ],
)
def test_what_cannot_be_is_refused_by_the_key(kind: type, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**keys)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("cp=2", "task=grpo and cp in the plan"),
        ("dp=2,zero=3", "task=grpo and zero=3 in the plan"),
        ("dp=2,servers=1", "task=grpo and servers in the plan"),
        ("tp=2,sequence=true", "task=grpo and sequence=true in the plan"),
    ],
)
def test_plans_that_cannot_sample_are_refused_by_name(plan: str, words: str, task: Path, tmp_path: Path) -> None:
    job = policy_job(task, tmp_path / "run")
    with pytest.raises(PlanError, match=words):
        check_combination(job, Plan.parse(plan, 2), spec_of(job))


def test_a_run_learns_from_completions_of_later_weights_than_the_first(task: Path, tmp_path: Path) -> None:
    table = grpo(task, rollout_servers=APART["rollout_servers"], max_staleness=4)
    more, few = (policy_job(task, tmp_path / "run", table, max_steps=steps) for steps in (6, 4))
    check_combination(more, Plan.parse("dp=2", 2), spec_of(more))
    with pytest.raises(ConfigError, match=r"grpo\.max_staleness is 4 and max_steps is 4"):
        check_combination(few, Plan.parse("dp=2", 2), spec_of(few))
    assert table.is_corrected and not grpo(task).is_corrected, "unless the job says otherwise"


def test_a_deterministic_run_samples_on_one_stage(task: Path, tmp_path: Path) -> None:
    job = policy_job(task, tmp_path / "run", deterministic=True)
    check_combination(job, Plan.parse("dp=2", 2), spec_of(job))
    with pytest.raises(PlanError, match="task=grpo with deterministic=true and pp=2"):
        check_combination(job, Plan.parse("pp=2", 2), spec_of(job))


def test_who_samples_the_same_bits_divides_the_model_by_stages_alone(task: Path, tmp_path: Path) -> None:
    for plan, words in (
        ("pp=2", "task=grpo with deterministic=true and pp=2"),  # heads of 16 are the least that the kernel takes
        ("tp=2", r"grpo\.rollout_plan is 'tp=2' and deterministic=true"),
        ("auto", r"grpo\.rollout_plan is 'auto' and deterministic=true"),
    ):
        table = grpo(task, rollout_nodes=(2,), rollout_plan=plan)
        for deterministic in (False, True):
            job = policy_job(task, tmp_path / "run", table, deterministic=deterministic)
            with pytest.raises((ConfigError, PlanError), match=words) if deterministic else nullcontext():
                check_combination(job, Plan.parse("pp=1", 2), spec_of(job))


@pytest.mark.parametrize("plan", ["pp=1", "dp=2", "pp=2", "tp=2,sequence=false", "dp=2,zero=2,recompute=layer"])
def test_other_plans_are_not(plan: str, task: Path, tmp_path: Path) -> None:
    job = policy_job(task, tmp_path / "run")
    check_combination(job, Plan.parse(plan, 2), spec_of(job))


@pytest.mark.parametrize(
    ("more", "keys", "words"),
    [
        ({"global_batch_size": 10}, {}, "global_batch_size is 10 and grpo.num_generations is 4"),
        ({"seq_len": 8}, {}, "grpo.max_completion_length is 8 and seq_len is 8"),
        ({"seq_len": 65}, {}, "seq_len is 65 and the model's context 64"),
        ({"max_steps": 5, "save_steps": 2}, {"num_iterations": 2}, "max_steps is 5 and grpo.num_iterations is 2"),
        ({"max_steps": 4, "save_steps": 3}, {"num_iterations": 2}, "save_steps is 3 and grpo.num_iterations is 2"),
        ({"local_steps": 2}, {}, "task=grpo and local_steps=2"),
        ({"delay_steps": 1}, {}, "task=grpo and delay_steps=1"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha is 5 and the task 'grpo' learns from completions"),
    ],
)
def test_jobs_that_do_not_go_with_sampling_are_refused(
    more: dict[str, Any], keys: dict[str, Any], words: str, task: Path, tmp_path: Path
) -> None:
    job = policy_job(task, tmp_path / "run", grpo(task, **keys), **more)
    with pytest.raises((ConfigError, PlanError), match=words):
        check_combination(job, Plan.parse("pp=1", 2), spec_of(job))


def test_turns_do_not_go_with_a_rope_that_grows_with_them(tmp_path: Path) -> None:
    write_task(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "rope_scaling": scaling, "max_position_embeddings": 12})
    )
    words = "grpo.tools, and seq_len is 16: this model's dynamic rope .* beyond 12 tokens"
    for tools in ((), ("tools.py:add",)):
        job = policy_job(tmp_path, tmp_path / "run", grpo(tmp_path, tools=tools))
        with pytest.raises(ConfigError, match=words) if tools else nullcontext():
            check_combination(job, Plan.parse("pp=1", 2), spec_of(job))


def test_a_task_and_its_table_come_together(task: Path, tmp_path: Path) -> None:
    for task_name in ("sft", "rejection"):
        with pytest.raises(ConfigError, match=rf"\[grpo\] is given and the task is '{task_name}'"):
            policy_job(task, tmp_path / "run", task=task_name)
    with pytest.raises(ConfigError, match=r"the task is 'grpo' and there is no table \[grpo\]") as caught:
        policy_job(task, tmp_path / "run", grpo=None)
    assert "reward_funcs" in caught.value.hint


def test_rows_of_a_step_are_those_that_are_kept_and_snapshots_fall_between_samplings(
    task: Path, tmp_path: Path
) -> None:
    best = RejectionConfig(reward_funcs=("rewards:correct",), num_generations=4, max_completion_length=8, keep=2)
    assert microbatches_of(policy_job(task, tmp_path / "run", best, microbatch_size=1)) == 8
    assert microbatches_of(policy_job(task, tmp_path / "run", microbatch_size=1)) == 16
    job = policy_job(task, tmp_path / "run", grpo(task, num_iterations=2), mirror_steps=3)
    assert snapshot_steps(job) == 4 and [step for step in range(1, 9) if is_snapshot_step(job, step)] == [4, 8]
