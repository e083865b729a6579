"""Runs that sample completions: every plan is one process, one that goes on never stopped, and they learn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.selection import pairs_in_turn, soak_but
from tests.support.training.post_training.policy_task import counting_job, grpo, policy_job, write_task
from tests.support.training.post_training.sampled_log_probs import policy_of, sampled_and_trained
from tests.support.training.post_training.told_runs import Told, check_same_run, told
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.engine.decode_recordings import DecodeRecordings
from tllm.kernels import library
from tllm.kernels.recording.recorder import recordable
from tllm.node.roles.colocated_rollouts import RecordedLayers, colocated_rollouts
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import RejectionConfig
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.policy.rollouts import PromptGroup, sampling_of
from tllm.training.report.events import RunEnded
from tllm.training.report.metrics import read_records

PLANS = (
    "dp=2",
    "dp=3:1",
    "dp=5",
    "pp=2",
    "tp=2",
    "dp=2,zero=2,recompute=layer",
    "pp=2,tp=1+2",
    "dp=2,pp=2,tp=2,zero=1,schedule=zero_bubble",
)
FAMILIES = ("llama", "mistral", "qwen3_moe", "qwen3_next_moe", "gpt_oss_moe", "glm4_moe_lite", "gemma3", "gemma4_moe")
WRONG = """

calls = []
right = closeness


def closeness(**columns):
    calls.append(1)
    if len(calls) > 1:
        raise ValueError("no verdict")
    return right(**columns)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


def grpo_job(task: Path, run: Path, **more: Any) -> Job:
    """With a reference, two steps on the same completions, and float64."""
    return policy_job(task, run, grpo(task, beta=0.1, num_iterations=2), dtype="float64", **more)


def rejection_job(task: Path, run: Path, **more: Any) -> Job:
    keys = dict(reward_funcs=(f"{task / 'rewards.py'}:closeness",), num_generations=4, max_completion_length=8)
    table = RejectionConfig(**keys, keep=2, threshold=-0.5, temperature=1.2, top_k=12)  # type: ignore[arg-type]
    return policy_job(task, run, table, dtype="float64", **more)


JOBS = {"grpo": grpo_job, "rejection": rejection_job}


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Each task's run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: told(job(task, folder / name), "pp=1") for name, job in JOBS.items()}


@pytest.mark.parametrize(("name", "plan"), pairs_in_turn(JOBS, PLANS, 3))
def test_every_plan_is_one_process(plan: str, name: str, task: Path, alone: dict[str, Told], tmp_path: Path) -> None:
    check_same_run(told(JOBS[name](task, tmp_path / "run"), plan), alone[name])
    assert alone[name][2].count("\n") == (8 if name == "grpo" else 16)


def test_the_steps_learn_from_what_was_sampled(alone: dict[str, Told]) -> None:
    first, second, third, _ = (record.metrics or {} for record in alone["grpo"][0])
    assert first["kl"] == 0 and second["kl"] > 1e-4
    assert first["clip_ratio/region_mean"] == 0 == third["clip_ratio/region_mean"]
    assert second["clip_ratio/region_mean"] > 0, "the second step of a sampling sees other weights than those"
    assert first["reward"] == second["reward"] != third["reward"]
    assert all((record.metrics or {})["sampling/sampling_logp_difference/mean"] < 1e-14 for record in alone["grpo"][0])
    kept = [(record.metrics or {})["rejection/kept_ratio"] for record in alone["rejection"][0]]
    assert all(0 < ratio <= 1 for ratio in kept) and alone["rejection"][0][-1].loss < alone["rejection"][0][0].loss


@pytest.mark.parametrize("name", JOBS)
def test_a_run_that_goes_on_is_one_that_never_stopped(
    name: str, task: Path, alone: dict[str, Told], tmp_path: Path
) -> None:
    """Stopped in its first step, it takes all that learn from what was sampled. It goes on under another plan."""
    job = JOBS[name](task, tmp_path / "run", save_steps=4)
    news = train(job, "pp=1", lambda: True)
    done = [one.step for one in news if isinstance(one, RunEnded)]
    assert done == [2 if name == "grpo" else 1]
    records(train(job, "dp=2"))
    want, tensors, completions = alone[name]
    assert (tmp_path / "run" / COMPLETIONS).read_text() == completions
    whole = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in whole] == [1, 2, 3, 4]
    assert max(abs(a.loss - b.loss) for a, b in zip(whole, want, strict=True)) < 1e-12
    off, where = furthest(final(tmp_path / "run"), tensors)
    assert off < 1e-11, where


@pytest.mark.parametrize("plan", soak_but(["dp=2"], ["pp=1", "dp=2"]))
def test_a_reward_that_goes_wrong_costs_no_step(plan: str, alone: dict[str, Told], tmp_path: Path) -> None:
    folder = tmp_path / "task"
    write_task(folder)
    right = (folder / "rewards.py").read_text()
    (folder / "rewards.py").write_text(right + WRONG)
    job = grpo_job(folder, tmp_path / "run", save_steps=4)
    with pytest.raises(ConfigError, match=r"closeness of rewards\.py raised ValueError: no verdict"):
        train(job, plan)
    assert (tmp_path / "run" / "step-2").is_dir(), "the steps before are saved"
    (folder / "rewards.py").write_text(right)
    train(job, plan)
    off, where = furthest(final(tmp_path / "run"), alone["grpo"][1])
    assert off < 1e-11, where


@pytest.mark.parametrize("plan", soak_but(["dp=4,zero=1"], ["dp=2", "dp=4,zero=1", "dp=2,zero=2"]))
def test_a_deterministic_run_is_one_process_to_the_bit(plan: str, task: Path, tmp_path: Path) -> None:
    found = []
    for number, text in enumerate(("pp=1", plan)):
        run = tmp_path / f"run-{number}"
        job = policy_job(task, run, grpo(task, beta=0.1, num_iterations=2), deterministic=True)
        found.append(told(job, text))
    (one, tensors, completions), (other, others, same) = found
    assert completions == same and [record.loss for record in one] == [record.loss for record in other]
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_a_prompt_that_is_too_long_is_named_and_nothing_is_begun(tmp_path: Path) -> None:
    write_task(tmp_path / "task")
    rows = tmp_path / "task" / "prompts.jsonl"
    rows.write_text(json.dumps({"prompt": "1" * 9 + "=", "count": 1}) + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 1: the prompt has 10 tokens.* leaves 8"):
        train(grpo_job(tmp_path / "task", tmp_path / "run"), "dp=2")


def test_completions_hang_on_the_seed_and_the_step_and_nothing_of_them_stays_in_the_cache(
    task: Path, tmp_path: Path
) -> None:
    """With a learning rate of nothing the same prompt is sampled anew in each step, from the same distribution."""
    seen = []
    for seed in (1, 1, 2):
        job = policy_job(task, tmp_path / f"run-{len(seen)}", grpo(task, num_completions_to_print=16), seed=seed)
        train(replace(job, learning_rate=0.0, max_steps=2), "pp=1")
        lines = (tmp_path / f"run-{len(seen)}" / COMPLETIONS).read_text().splitlines()
        seen.append([json.loads(line)["completion"] for line in lines])
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) > 24


@pytest.mark.parametrize("family", soak_but(FAMILIES[3:7], FAMILIES))
def test_the_engine_tells_the_log_probabilities_that_the_trainer_finds(family: str, tmp_path: Path) -> None:
    """In float64 to rounding, in float32 to 1e-6 of the largest, and on average absolutely."""
    save_model(family, tmp_path)
    for dtype, most in (("float64", 1e-13), ("float32", 1e-6)):
        told_T, *found = sampled_and_trained(tmp_path, dtype)
        assert len(told_T) == 12 * 24 and bool((told_T < 0).all())
        for found_T in found:
            off_T = (told_T - found_T).abs()
            assert float(off_T.max() / told_T.abs().max()) < most and float(off_T.mean()) < most


def test_layers_that_are_played_have_the_weights_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed where they lie, as a step does, and moved. The products are those of layers that are computed."""
    kernels = library.loaded()
    assert kernels is not None
    alone = recordable(kernels)
    monkeypatch.setattr(library, "loaded", lambda: alone)
    save_model("llama", tmp_path, head_dim=32)
    config, model = policy_of(tmp_path, "float32", length=6)
    played, computed = colocated_rollouts(config, model), colocated_rollouts(config, model)
    computed._layers = None
    groups, seen = [PromptGroup((3, 1, 4), (1, 2, 3, 4)), PromptGroup((1, 5), (6, 7, 8, 9))], []
    parameters = list(model.chunks[0].parameters())
    for moves in (False, False, True):
        with torch.no_grad():
            for weight in parameters:
                weight.data = weight.data.clone() if moves else weight.data
                weight.mul_(1.1)
        seen.append(played.sample(groups, (), sampling_of(config.job)))
        assert seen[-1] == computed.sample(groups, (), sampling_of(config.job))
        recordings = played._stage.graphs
        assert isinstance(recordings, DecodeRecordings) and recordings.recorded[8] is not None
    assert seen[0] != seen[1] != seen[2]
    stage = played._stage
    stage.graphs = None
    RecordedLayers(model.chunks[0], stage, deterministic=True).follow_weights()
    assert stage.graphs is None, "which way is faster is measured, and the two differ by rounding"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_model_learns_to_count(task: Path, tmp_path: Path) -> None:
    """From random weights to nine of ten right: `3=` is answered by `aaa` and the end. About a minute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = counting_job(task, tmp_path / "run")
    try:
        right = [(record.metrics or {})["rewards/correct/mean"] for record in records(train(job, "pp=1"))]
    finally:
        torch.set_num_threads(threads)
    assert sum(right[:5]) / 5 < 0.2 and sum(right[-5:]) / 5 > 0.8
