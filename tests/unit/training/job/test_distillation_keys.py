"""The table `[distill]`: what it refuses, each in one line."""

from __future__ import annotations

from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.training.job.job_file import read_job, write_job

JOB: dict[str, Any] = dict(output_dir="run", train_files=["rows.jsonl"], max_steps=3, model_name_or_path="student")
TABLE: dict[str, Any] = dict(teacher_model_name_or_path="teacher")

SETS = ["distill.hidden_state_layers=[[0, 1], [-1, -1]]", "distill.teacher_hidden_size=64"]
STATES: dict[str, Any] = dict(hidden_state_layers=[[0, 1]], teacher_hidden_size=64)


def test_a_job_with_its_table_is_read_and_written(tmp_path: Any) -> None:
    resolved = read_job({**JOB, "task": "distill", "distill": TABLE}, [*SETS, "distill.top_k=8", "distill.beta=0.5"])
    assert resolved.job.distill is not None and resolved.job.distill.hidden_state_layers == ((0, 1), (-1, -1))
    assert resolved.job.distill is not None and resolved.job.distill.top_k == 8 and resolved.job.distill.beta == 0.5
    again = tmp_path / "job.toml"
    again.write_text(write_job(resolved))
    assert read_job(again).job == resolved.job


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"temperature": 0}, "distill.temperature is 0 and must be more"),
        ({"temperature": -1}, "distill.temperature is -1.0 and must be 0 or more"),
        ({"beta": 1.5}, "distill.beta is 1.5 and must be 1 or less"),
        ({"alpha": -0.1}, "distill.alpha is -0.1 and must be 0 or more"),
        ({"alpha": float("nan")}, "distill.alpha is nan"),
        ({"top_k": -1}, "distill.top_k is -1 and must be 0 or more"),
        ({"teacher_dtype": "int8"}, "distill.teacher_dtype is 'int8'"),
        ({"teachers": ["here:1"]}, "and both are given"),
        ({"teacher_model_name_or_path": ""}, "and neither is given"),
        ({"teacher_model_name_or_path": "", "teachers": ["here"]}, "has 'here', which is not HOST:PORT"),
        ({"teacher_model_name_or_path": "", "teachers": ["here:70000"]}, "which is not HOST:PORT"),
        ({"teacher_model_name_or_path": "", "teachers": ["here:" + "7" * 5000]}, "which is not HOST:PORT"),
        ({"kl_budget": -0.1}, "distill.kl_budget is -0.1 and must be 0 or more"),
        ({"kl_budget": 0.1, "top_k": 0}, "distill.kl_budget is 0.1 and distill.top_k is 0: a budget chooses"),
        ({"kl_budget": 0.1, "top_k": 65536}, "distill.top_k is 65536"),
        ({"log_prob_dtype": "uint8"}, 'distill.log_prob_dtype is "uint8" and distill.kl_budget is 0.0: rounding'),
        ({"log_prob_dtype": "uint8", "kl_budget": 0.0008}, "may lose 0.00087 nats a token, which a budget must have"),
        ({"log_prob_dtype": "float16"}, "distill.log_prob_dtype is 'float16'"),
        ({"lmbda": 1.5}, "distill.lmbda is 1.5 and must be 1 or less"),
        ({"lmbda": 0.5, "alpha": 0.1}, "distill.alpha is 0.1 and distill.lmbda is 0.5: there is no text"),
        ({"lmbda": 1, "max_completion_length": 0}, "distill.max_completion_length is 0 and must be 1 or more"),
        ({"lamda": 0.5}, "'distill.lamda' is no key of a job"),
        ({"lmbda": 1, "rollout_nodes": ["9" * 5000]}, "distill.rollout_nodes is 9"),
        ({"rollout_nodes": 1}, "distill.rollout_nodes is given and distill.lmbda is 0"),
        ({"max_staleness": 1}, "distill.max_staleness is given and distill.lmbda is 0"),
        (
            {"max_staleness": 1, "lmbda": 1},
            "1 and distill.rollout_servers and rollout_nodes are empty",
        ),
        ({"teacher_hidden_size": 64}, "distill.hidden_state_layers names no hidden states"),
        ({"hidden_state_layers": [[0, 1]]}, "distill.teacher_hidden_size is not"),
        ({**STATES, "hidden_state_loss_weight": 0}, "distill.hidden_state_loss_weight is 0: "),
        ({**STATES, "hidden_state_loss_weight": -1}, "distill.hidden_state_loss_weight is -1.0 and must be 0 or more"),
        ({**STATES, "hidden_state_loss": "mae"}, "distill.hidden_state_loss is 'mae'"),
        ({**STATES, "hidden_state_dtype": "int8"}, "distill.hidden_state_dtype is 'int8'"),
        ({**STATES, "hidden_state_layers": [[0, 1], [0, 1]]}, "distill.hidden_state_layers names [0, 1] twice"),
        ({**STATES, "hidden_state_layers": [[0, 1, 2]]}, "distill.hidden_state_layers = [[0, 1, 2]]"),
        ({**STATES, "teacher_hidden_size": 0}, "distill.teacher_hidden_size is 0 and must be 1 or more"),
        ({"teacher_nodes": 0}, "distill.teacher_nodes is 0"),
        ({"teacher_nodes": ["b", "b"]}, "distill.teacher_nodes names b twice"),
        ({"teacher_nodes": ["b", "auto"]}, "distill.teacher_nodes has 'auto' among 2 values"),
        ({"lmbda": 1, "teacher_nodes": ["b"], "rollout_nodes": ["c", "b"]}, "rollout_nodes both name b"),
        (
            {"teacher_model_name_or_path": "", "teachers": ["here:1"], "teacher_nodes": 1},
            "distill.teachers gives addresses and distill.teacher_nodes nodes of the cluster for the same role",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_job({**JOB, "task": "distill", "distill": {**TABLE, **table}})
    assert message in str(caught.value)


@pytest.mark.parametrize(("task", "table"), [("distill", None), ("sft", TABLE)])
def test_the_task_and_its_table_go_together(task: str, table: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match=r"\[distill\]"):
        read_job({**JOB, "task": task, **({"distill": table} if table else {})})
