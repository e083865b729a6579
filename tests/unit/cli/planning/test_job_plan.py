"""`tllm plan JOB.toml`: time and memory of every role of a job, and how a run says what they really took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.training.post_training.policy_task import write_task
from tests.unit.planner.measured.test_survey import SPEC, serving_node, survey_of, training_node
from tllm.cli.commands.train import _chooser_of
from tllm.cli.main import main
from tllm.cli.planning.outcome import training_outcome
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.planner.measured.survey import SampledPasses, Survey, SurveyedNode, cluster_of, read_survey
from tllm.spec.plan import Plan
from tllm.training.job.job_file import ResolvedJob, read_job
from tllm.training.report.metrics import StepRecord

CLUSTER = """
[link]
latency = "0.2 ms"
bandwidth = "1 Gbit/s"

[[node]]
name = "box"
count = 2
memory = "4 GB"
memory_bandwidth = "4 GB/s"
flops = { float32 = "10 Gflop/s" }
"""

JOB = """
config_name = "config.json"
tokenizer_name = "tokenizer.json"
train_files = "prompts.jsonl"
output_dir = "run"
task = "grpo"
max_steps = 4
seq_len = 16
global_batch_size = 16

[grpo]
reward_funcs = ["rewards:closeness"]
num_generations = 4
max_completion_length = 8
"""

ASKED = (
    *("task=grpo", "grpo.reward_funcs=rewards:one", "grpo.num_generations=4", "grpo.max_completion_length=16"),
    *("output_dir=run", "train_files=rows.jsonl", "config_name=c.json", "max_steps=9", "seq_len=32"),
    "global_batch_size=8",
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_task(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "job.toml"


def sampling_node(name: str) -> SurveyedNode:
    """One that was measured when it trains and when it samples."""
    found = serving_node(name)
    return msgspec.structs.replace(
        training_node(name), sampling=SampledPasses(layers=found.layers, logits=found.logits)
    )


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert main(["plan", "job.toml", "--cluster", "cluster.toml", "--json", *more]) == 0
    best: dict[str, object] = json.loads(capsys.readouterr().out)["choices"][0]
    return best


def test_each_role_has_its_seconds_and_its_memory(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(capsys, "--plan", "pp=1")
    held = planned(capsys, "--plan", "pp=1", "--set", "grpo.beta=0.1")
    for found, names in ((plain, {"sampling", "policy"}), (held, {"sampling", "reference", "policy"})):
        roles = found["roles"]
        assert isinstance(roles, dict) and set(roles) == names
        assert sum(roles.values()) == pytest.approx(found["seconds"])
    (memory,), (more,) = plain["memory"], held["memory"]  # type: ignore[misc]
    assert memory["cache"] == 16 * 16 * 2 * 2 * 2 * 8 * 4, "16 completions of 16 tokens; 2 layers, 2 heads of 8"
    assert more["reference"] == more["weights"] == more["total"] - memory["total"]
    assert main(["plan", "job.toml", "--cluster", "cluster.toml"]) == 0
    out = capsys.readouterr().out
    assert "seconds of a step by role: sampling " in out and "cache" in out


def test_a_reference_that_is_computed_once_is_told_apart(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in JOB.replace("grpo", "dpo").splitlines() if "max_comp" not in line]
    job.write_text("\n".join(line for line in lines if "reward" not in line and "num_gen" not in line))
    assert main(["plan", "job.toml", "--cluster", "cluster.toml"]) == 0
    out = capsys.readouterr().out
    assert "before the first step: the reference's forward pass, " in out and "by role" not in out


def test_a_plan_for_more_machines_than_there_are_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.toml", "--cluster", "cluster.toml", "--plan", "dp=3"]) == 2
    assert "has 3 ranks and the cluster 2 devices" in capsys.readouterr().err
    assert main(["plan", "job.toml"]) == 2
    assert "no machines are given for job.toml" in capsys.readouterr().err


def test_a_run_that_samples_has_its_plan_chosen_by_machines_measured_so(job: Path) -> None:
    """A survey in which nothing was sampled does not say how long that takes."""
    chooser = TrainingChooser(read_job(job), "{}", SPEC, 2)
    asked = chooser.settings()
    assert asked.rollouts == (1, 16) and asked.prompt == 8 and not asked.sequences
    for node, is_enough in ((training_node, False), (sampling_node, True)):
        chooser.known = survey_of("train", node("a"), node("b"))
        assert (chooser.recalled() is not None) == is_enough
        assert (msgspec.structs.replace(chooser.known).has_sampling) == is_enough


def test_what_was_measured_of_sampling_is_kept_and_corrected(tmp_path: Path) -> None:
    survey = survey_of("train", sampling_node("a"))
    survey.save(tmp_path / "survey.json")
    assert read_survey(tmp_path / "survey.json") == survey
    slower = cluster_of(survey.slower(2.0), SPEC).devices[0].serving
    device = cluster_of(survey, SPEC).devices[0]
    assert device.serving == replace(cluster_of(as_serving(survey), SPEC).devices[0], update_seconds=1e-9)
    assert slower is not None and device.serving is not None
    assert slower.memory_bandwidth == pytest.approx(device.serving.memory_bandwidth / 2)


def as_serving(survey: Survey) -> Survey:
    (node,) = survey.nodes
    found = msgspec.structs.replace(serving_node("a"), update=node.update)
    return msgspec.structs.replace(survey, goal="serve", nodes=(found,))


def resolved(folder: Path) -> ResolvedJob:
    return read_job(None, [*ASKED[:4], f"output_dir={folder}", *ASKED[5:]])


def test_a_step_is_told_by_role_for_completions_as_long_as_they_were(tmp_path: Path) -> None:
    survey = survey_of("train", sampling_node("a"))
    chooser = TrainingChooser(resolved(tmp_path), "{}", SPEC, 1, Plan.parse("pp=1", SPEC.num_layers))
    chooser.says = lambda text: None
    chosen = chooser.decide(survey)
    zero = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_second"), 0.0)
    roles = {"sampling": 2.0, "rewards": 0.5}
    metrics = {"completions/mean_length": 5.0}
    records = [
        StepRecord(step=step, tokens=8 * 15, seconds=4.0, metrics=metrics, role_seconds=roles, **zero)  # type: ignore[arg-type]
        for step in range(1, 6)
    ]
    outcome = training_outcome(chooser, records)
    assert outcome is not None
    measured, predicted = outcome.measured, outcome.predicted
    assert (measured.sampling, measured.rewards, measured.policy, measured.seconds) == (2.0, 0.5, 1.5, 4.0)
    assert predicted.rewards is None and predicted.sampling is not None and predicted.policy is not None
    assert predicted.sampling + predicted.policy == pytest.approx(predicted.seconds)
    longest = dict(chosen.predicted.roles)["sampling"]
    assert 0.1 * longest < predicted.sampling < 0.5 * longest, "5 tokens where 16 were allowed"
    assert predicted.policy < chosen.predicted.policy


def test_a_run_that_samples_is_chosen_for_as_any_other(tmp_path: Path) -> None:
    class Told:
        resolved = resolved(tmp_path)
        plan, spec = Plan.parse("dp=2", SPEC.num_layers), SPEC

    chooser = _chooser_of(Told, "{}", True)  # type: ignore[arg-type]
    assert chooser is not None and chooser.given is None and chooser.facts().sampling is not None
