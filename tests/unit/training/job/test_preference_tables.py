"""Tables of preferences in a job: what their keys may be, and that each belongs to its task."""

from __future__ import annotations

from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.training.job.job_file import read_job, write_job

BASE = dict(output_dir="run", train_files=["a.jsonl"], max_steps=1, model_name_or_path="m")


def test_a_table_is_read_and_written(tmp_path: Any) -> None:
    resolved = read_job({**BASE, "task": "dpo", "dpo": {"beta": 0.2, "loss_type": "ipo"}}, ["dpo.ld_alpha=0.5"])
    table = resolved.job.dpo
    assert table is not None and (table.beta, table.loss_type, table.ld_alpha) == (0.2, "ipo", 0.5)
    (tmp_path / "job.toml").write_text(write_job(resolved))
    assert read_job(tmp_path / "job.toml").job == resolved.job


@pytest.mark.parametrize(
    ("task", "table", "says"),
    [
        ("dpo", {"beta": 0.0}, "dpo.beta is 0.0 and must be more than 0"),
        ("kto", {"beta": -1.0}, "kto.beta is -1.0"),
        ("orpo", {"beta": 0}, "orpo.beta is 0"),
        ("simpo", {"beta": 0}, "simpo.beta is 0"),
        ("dpo", {"loss_type": "sigmod"}, "dpo.loss_type is 'sigmod'"),
        ("dpo", {"label_smoothing": 0.5, "loss_type": "robust"}, "dpo.label_smoothing is 0.5 and must be less than"),
        ("dpo", {"label_smoothing": 0.1, "loss_type": "hinge"}, "the loss 'hinge' has none"),
        ("dpo", {"loss_type": "exo_pair"}, "of which it takes the logarithm"),
        ("dpo", {"ld_alpha": 1.5}, "dpo.ld_alpha is 1.5"),
        ("kto", {"loss_type": "dpo"}, "kto.loss_type is 'dpo'"),
        ("kto", {"desirable_weight": -1.0}, "kto.desirable_weight is -1.0"),
        ("reward", {"center_rewards_coefficient": -0.1}, "reward.center_rewards_coefficient"),
        ("dpo", {"gamma": 1.0}, "'dpo.gamma' is no key"),
    ],
)
def test_a_value_that_cannot_be_is_refused(task: str, table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_job({**BASE, "task": task, task: table})


def test_a_table_of_another_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[dpo\] is given and the task is 'sft'"):
        read_job({**BASE, "dpo": {"beta": 0.1}})
