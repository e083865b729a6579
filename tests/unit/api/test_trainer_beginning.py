"""What a job names is looked at when its run is opened, before machines are waited for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.post_training.preferences import preference_job, small_model
from tests.unit.training.checkpoint.test_kills import blocks_at
from tllm.api.trainer import Trainer
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.harness import harness_evaluation
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.job_file import DEFAULT, TYPES, ResolvedJob, read_job, write_job
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.run_folder import start_now, write_start


def written(job: Job) -> Path:
    """The job as a file beside its run."""
    path = Path(job.output_dir).parent / "job.toml"
    path.write_text(write_job(ResolvedJob(job, dict.fromkeys(TYPES, DEFAULT))))
    return path


def refusal(job: Job, ranks: int | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Trainer(written(job), ranks=ranks).beginning  # noqa: B018 - it is what looks
    return caught.value


@pytest.mark.parametrize(
    ("key", "name"),
    [("reward_funcs", "gone.py:correct"), ("tools", "gone.py:look"), ("environment_factory", "gone.py:Safe")],
)
def test_a_file_of_functions_that_is_not_there(key: str, name: str, tmp_path: Path) -> None:
    write_task(tmp_path)
    named = f"{tmp_path}/{name}"
    table = grpo(tmp_path, **{key: named if key == "environment_factory" else (named,)})
    fault = refusal(policy_job(tmp_path, tmp_path / "run", table))
    assert f"{key} names {name.partition(':')[2]} of {tmp_path}/gone.py, which is no file" == fault.message
    assert not (tmp_path / "run").exists()


def test_a_reward_model_that_gives_no_score(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "judge").mkdir()
    path = tmp_path / "judge" / "config.json"
    path.write_text((tmp_path / "config.json").read_text())
    table = grpo(tmp_path, reward_model_name_or_path=str(tmp_path / "judge"))
    job = policy_job(tmp_path, tmp_path / "run", table)
    fault = refusal(job)
    assert "has no classification head, and a reward model has one of 1 label" in fault.message
    scores = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | scores))
    assert Trainer(written(job)).beginning.spec.num_layers


@pytest.mark.parametrize(
    ("task", "metric", "known"),
    [("sft", "accuracy", "loss, perplexity"), ("grpo", "loss", "reward, rewards/closeness/mean")],
)
def test_a_metric_that_evaluations_do_not_tell(task: str, metric: str, known: str, tmp_path: Path) -> None:
    write_task(tmp_path)
    job = policy_job(tmp_path, tmp_path / "run", eval_files=(str(tmp_path / "prompts.jsonl"),), eval_steps=2)
    if task == "sft":
        job = replace(job, task="sft", grpo=None)
    fault = refusal(replace(job, metric_for_best_model=metric, early_stopping_patience=1))
    assert f"metric_for_best_model is '{metric}', which the task '{task}' does not tell" == fault.message
    assert fault.hint == f"known: {known}"


@pytest.mark.parametrize(
    ("began", "now", "message"),
    [
        (LoraJob(r=8), None, "trains an adapter of rank 8, and this job the whole model"),
        (None, LoraJob(r=8), "trains the whole model, and this job an adapter of rank 8"),
        (LoraJob(r=8), LoraJob(r=4), "trains an adapter of rank 8, and this job an adapter of rank 4"),
    ],
)
def test_saves_of_something_else_than_is_now_learned(
    began: LoraJob | None, now: LoraJob | None, message: str, tmp_path: Path
) -> None:
    small_model("llama", tmp_path / "model")
    run = tmp_path / "run"
    job = preference_job(tmp_path / "model", run, "dpo")
    write_start(run, read_job(written(replace(job, lora=began))), start_now(0, Plan.parse("pp=1", 2)))
    assert Trainer(written(replace(job, lora=now))).beginning.spec.num_layers, "nothing was saved yet"
    saves = AsyncSaves(run)
    saves.save(2, blocks_at(2), {"step": 2})
    saves.wait()
    fault = refusal(replace(job, lora=now))
    assert fault.message == f"the run in {run} {message}" and "another output_dir" in fault.hint
    assert Trainer(written(replace(job, lora=began))).beginning.spec.num_layers


@pytest.mark.parametrize("nodes", [(), (1,)])
def test_a_teacher_of_other_tokens(nodes: tuple[int | str, ...], tmp_path: Path) -> None:
    """Beside the student or on a node, which would tell it once it has loaded its weights."""
    for name in ("student", "teacher"):
        small_model("llama", tmp_path / name)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    keys = DistillationKeys(teacher_model_name_or_path=str(tmp_path / "teacher"), teacher_nodes=nodes)
    job = preference_job(
        tmp_path / "student", tmp_path / "run", "distill", train_files=(str(tmp_path / "rows.jsonl"),), distill=keys
    )
    assert Trainer(written(job), ranks=1 + len(nodes)).beginning.spec.num_layers
    path = tmp_path / "teacher" / "tokenizer.json"
    swapped = {"w1": "w2", "w2": "w1"}
    tokens = json.loads(path.read_text())
    vocab = tokens["model"]["vocab"]
    tokens["model"]["vocab"] = {swapped.get(token, token): number for token, number in vocab.items()}
    path.write_text(json.dumps(tokens))
    fault = refusal(job, 1 + len(nodes))
    assert "2 of" in fault.message and "tokens of the teacher" in fault.message and "same series" in fault.hint


def test_lm_eval_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model("llama", tmp_path / "model")
    monkeypatch.setattr(harness_evaluation, "find_spec", lambda name: None)
    fault = refusal(preference_job(tmp_path / "model", tmp_path / "run", "dpo", lm_eval_tasks=("arc_easy",)))
    assert fault.message == "lm_eval_tasks needs lm-evaluation-harness, and lm_eval is not installed"
    assert "together-llm[eval]" in fault.hint and not (tmp_path / "run").exists()
