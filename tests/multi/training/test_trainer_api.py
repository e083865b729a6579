"""`Trainer` and `train` from a Python program, over processes, and `LLM` with what they made."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.support.training.post_training.policy_task import write_task
from tests.support.training.small_job import write_job
from tllm import LLM, SamplingParams, Trainer, train
from tllm.core.errors import ConfigError, PlanError
from tllm.training.report.events import RunBegan, RunEnded, RunEvent, RunSaved, RunStepped
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts processes that load torch


def test_a_run_tells_and_returns_what_it_did_and_its_model_serves(tmp_path: Path) -> None:
    job = write_job(tmp_path, max_steps=6, save_steps=3)
    events: list[RunEvent] = []
    result = train(job, plan="dp=2", on_event=events.append)
    assert result.step == 6 and result.model == tmp_path / "run" / "final"
    assert [record.step for record in result.records] == list(range(1, 7))
    assert list(result.records) == read_records(tmp_path / "run" / FILE)
    assert isinstance(events[0], RunBegan) and isinstance(events[-1], RunEnded)
    assert sum(isinstance(event, RunStepped) for event in events) == 6
    assert {event.step for event in events if isinstance(event, RunSaved)} >= {3}
    assert "plan" in (tmp_path / "run" / "starts.jsonl").read_text()
    with LLM(result.model, plan="pp=2", dtype="float32") as cut, LLM(result.model, dtype="float32") as whole:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        assert cut.generate("The", params) == whole.generate("The", params)


def test_a_mapping_is_a_job_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    job = tomllib.loads(write_job(tmp_path, max_steps=2, save_steps=2, lr_scheduler_type="constant").read_text())
    assert train(job).step == 2
    result = Trainer(job | {"max_steps": 4}).train()
    assert [record.step for record in result.records] == [3, 4]
    assert [record.step for record in read_records(tmp_path / "run" / FILE)] == [1, 2, 3, 4]
    assert result.model == tmp_path / "run" / "final"


def test_what_is_wrong_with_a_job_is_said_before_anything_is_written(tmp_path: Path) -> None:
    job = tomllib.loads(write_job(tmp_path, max_steps=2).read_text())
    with pytest.raises(ConfigError, match="the job: 'learning_rat' is no key") as error:
        Trainer(job | {"learning_rat": 1.0})
    assert "learning_rate" in error.value.hint
    with pytest.raises(ConfigError, match="the job does not give"):
        Trainer({"max_steps": 2})
    with pytest.raises(PlanError, match="2 ranks for 3"):
        Trainer(job, plan="dp=2", ranks=3)
    taught = job | {"task": "distill", "distill": {"teacher_model_name_or_path": "teacher", "teacher_nodes": 2}}
    with pytest.raises(ConfigError, match=r"distill.teacher_nodes take 2 of 2 machines"):
        Trainer(taught, ranks=2)
    with pytest.raises(PlanError, match="1 rank for 4 machines or processes, of which 2 have a role beside it"):
        Trainer(taught, plan="pp=1", ranks=4)
    assert not (tmp_path / "run").exists()
    assert Trainer(job, ranks=2).plan.replicas == 2
    assert json.loads(Trainer(job).config)["model_type"] == "llama"


def test_what_a_reward_function_prints_is_printed_by_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the process of rank 0, which has no stdout of its own."""
    write_task(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "def seen(completions, **columns):\n"
        "    print('rewards for', len(completions))\n"
        "    return [1.0] * len(completions)\n"
    )
    job = {
        **dict(task="grpo", max_steps=1, seq_len=16, global_batch_size=8, output_dir=str(tmp_path / "run")),
        **dict(config_name=str(tmp_path / "config.json"), tokenizer_name=str(tmp_path / "tokenizer.json")),
        "train_files": [str(tmp_path / "prompts.jsonl")],
        "grpo": dict(reward_funcs=[f"{tmp_path / 'rewards.py'}:seen"], num_generations=4, max_completion_length=8),
    }
    train(job)
    assert capsys.readouterr().out == "rewards for 8\n"
