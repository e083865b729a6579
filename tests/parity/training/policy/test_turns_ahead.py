"""Completions of several turns that are sampled ahead: a plain loop, and runs that lose servers and stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.training.policy.test_environment_runs import DESK, keys
from tests.parity.training.policy.test_remote_rollouts import HangsUp
from tests.support.training.post_training.plain_tools import (
    plain_advantages,
    plain_completion,
    plain_steps,
    tools_of,
    watch,
)
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.post_training.told_runs import told
from tests.support.training.post_training.tool_task import tool_grpo, tool_job, write_tool_task
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.node.roles.rollout_model import RolloutModel
from tllm.training.job.job import Job
from tllm.training.objectives.rollout_correction import RATIO
from tllm.training.rollout_servers.sampled_ahead import STALENESS

STEPS = 3


def ahead_job(task: Path, run: Path, secret: Path, *servers: str, table: dict[str, Any], **more: Any) -> Job:
    elsewhere = dict(rollout_servers=servers, rollout_secret=str(secret), max_staleness=1)
    return tool_job(task, run, tool_grpo(task, **elsewhere, **table), **{"max_steps": STEPS, **more})


def test_a_run_is_the_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which finds the probabilities of all turns by the weights of the step before, and corrects for them: those of the
    tokens that the model wrote, and of none that tools did."""
    task, secret, seen = tmp_path / "task", tmp_path / "key", watch(monkeypatch)
    write_tool_task(task)
    with sampling(task, secret) as one:
        job = ahead_job(task, tmp_path / "run", secret, address_of(one), table={"beta": 0.1}, max_grad_norm=1e9)
        got = records(train(job, "pp=1"))
    metrics = [record.metrics or {} for record in got]
    assert [one[STALENESS] for one in metrics] == [0, 1, 1]
    assert abs(metrics[0][f"{RATIO}/max"] - 1) < 1e-9 and metrics[2][f"{RATIO}/max"] > 1.001
    tokenizer = transformers.AutoTokenizer.from_pretrained(task)
    made = [plain_completion(tools_of(task), tokenizer, turns, 160) for turns in seen.turns.values()]
    assert len(made) == 16 * STEPS and sum(one.calls for one in made) > 16
    steps = [made[16 * step : 16 * (step + 1)] for step in range(STEPS)]
    model = transformers.AutoModelForCausalLM.from_pretrained(task, dtype=torch.float64)
    want = plain_steps(job, model, [(one, plain_advantages(task, one, 4, ("found", "short"))) for one in steps])
    assert max(abs(one.loss - other) for one, other in zip(got, want, strict=True)) < 1e-10
    trained = {name: x for name, x in model.state_dict().items() if name in final(tmp_path / "run")}
    off, where = furthest(final(tmp_path / "run"), trained)
    assert off < 1e-9, where


@pytest.mark.soak
def test_a_run_that_stops_after_every_step_and_loses_a_server_has_the_same_bits(tmp_path: Path) -> None:
    """Environments of completions that a save holds are where they were: rewards are asked of them."""
    task, secret = tmp_path / "task", tmp_path / "key"
    write_tool_task(task, head_dim=16)
    (task / "desk.py").write_text(DESK)
    table, more = keys(task), dict[str, Any](dtype="float32", deterministic=True, max_steps=5)
    dying = HangsUp(RolloutModel.open(str(task)))
    with sampling(task, secret) as one, sampling(task, secret, dying) as two:
        dying.servers.append(two)
        want = told(ahead_job(task, tmp_path / "calm", secret, address_of(one), table=table, **more), "pp=1")
        job = ahead_job(task, tmp_path / "run", secret, address_of(one), address_of(two), table=table, **more)
        for plan in ("pp=1", "dp=2", "pp=1", "dp=2,zero=1"):
            train(job, plan, lambda: True)
        got = told(job, "pp=1")
    assert len(dying.asked) > 2 and '"role":"tool"' in want[2]
    assert got[2] == want[2] and all(torch.equal(got[1][name], want[1][name]) for name in want[1])
