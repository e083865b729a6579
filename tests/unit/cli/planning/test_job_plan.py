"""`tllm plan JOB.toml`: time and memory of every role of a job, and how a run says what they really took."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.training.post_training.policy_task import write_task
from tests.support.training.post_training.preferences import pair_rows, preference_job, small_model
from tests.unit.planner.measured.test_survey import SPEC, serving_node, survey_of, training_node
from tests.unit.planner.roles.test_role_machines import cluster as machines_of
from tllm.cli.commands.train import _chooser_of
from tllm.cli.main import main
from tllm.cli.planning.outcome import as_text, training_outcome
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.cli.planning.role_outcome import as_long_as_measured
from tllm.cli.planning.role_wishes import named_devices
from tllm.cli.planning.run_watch import Watch
from tllm.planner.measured.survey import SampledPasses, Survey, SurveyedNode, cluster_of, read_survey
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.plan import Plan
from tllm.training.job import initial_model
from tllm.training.job.initial_model import spec_of
from tllm.training.job.job_file import DEFAULT, TYPES, ResolvedJob, read_job
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--goal", "serve"], "job.toml is a job, and --goal is serve"),
        (["--batch", "128"], "--batch is for a model, and job.toml is a job"),
        (["--dtype", "float32"], "--dtype is for a model, and job.toml is a job"),
        (["--set", "grpo.rollout_nodes=1", "--svg", "a.svg"], "--svg is of one plan's step"),
        (["--set", "grpo.rollout_nodes=1", "--explain"], "--explain is of one plan's step"),
    ],
)
def test_options_that_a_job_leaves_without_effect_are_refused(
    words: list[str], said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "job.toml", "--cluster", "cluster.toml", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "\nhint: " in shown.err and not shown.out


def test_machines_that_score_are_planned_with_all_others(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards have seconds, and who computes them has memory: in what is shown, and in the commands that start it."""
    (job.parent / "REWARD").mkdir()
    config = json.loads((job.parent / "config.json").read_text()) | {
        "architectures": ["LlamaForSequenceClassification"],
        "num_labels": 1,
    }
    (job.parent / "REWARD" / "config.json").write_text(json.dumps(config))
    named = ("--set", "grpo.reward_model_name_or_path=REWARD")
    here = planned(capsys, *named, "--plan", "pp=1")
    assert here["roles"]["rewards"] > 0 and here["memory"][0]["reward"] > 0  # type: ignore[index]
    found = planned(capsys, *named, "--set", "grpo.reward_nodes=1")
    assert found["memory"]["reward"] > 0  # type: ignore[index]
    assert found["rewards"] == ["box1"] and found["scoring"] == pytest.approx(here["roles"]["rewards"])  # type: ignore[index]
    assert main(["plan", "job.toml", "--cluster", "cluster.toml", *named, "--set", "grpo.reward_nodes=auto"]) == 0
    out = capsys.readouterr().out
    assert "a machine that scores holds " in out and "scoring s" in out and "--set grpo.reward_nodes=" in out
    divided = ("--set", "grpo.reward_nodes=auto", "--set", "grpo.reward_plan=pp=2")
    assert main(["plan", "job.toml", "--cluster", "cluster.toml", "--json", *named, *divided]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["commands"][0][1])
    sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    assert read_job(job, sets).job.grpo.reward_nodes == (), "one machine beside the first is no reward model"  # type: ignore[union-attr]


def test_machines_are_taken_in_the_order_in_which_the_job_names_them() -> None:
    assert named_devices(machines_of(1.0, 1.0, 1.0, 1.0), ("n3", "n1"), "grpo.reward_nodes") == (3, 1)


def test_a_reference_that_is_computed_once_is_told_apart(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in JOB.replace("grpo", "dpo").splitlines() if "max_comp" not in line]
    job.write_text("\n".join(line for line in lines if "reward" not in line and "num_gen" not in line))
    assert main(["plan", "job.toml", "--cluster", "cluster.toml"]) == 0
    out = capsys.readouterr().out
    assert "before the first step: the reference's forward pass, " in out and "by role" not in out


def test_a_plan_for_more_machines_than_there_are_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.toml", "--cluster", "cluster.toml", "--plan", "dp=3"]) == 3
    assert "has 3 ranks and the cluster 2 devices" in capsys.readouterr().err
    assert main(["plan", "job.toml"]) == 2
    assert "no machines are given for job.toml" in capsys.readouterr().err


def test_a_plan_that_is_given_is_timed_without_the_nodes_of_its_roles(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("plan", "job.toml", "--cluster", "cluster.toml", "--plan", "pp=1")
    for more, is_alone in (((), False), (("--set", "grpo.rollout_nodes=1"), True)):
        assert main([*given, *more]) == 0
        assert ("policy's part: rollout nodes come on top" in capsys.readouterr().out) == is_alone
    survey_of("train", sampling_node("a")).save(tmp_path / "survey.json")

    class Told:
        resolved = read_job(job, [f"output_dir={tmp_path}", "grpo.rollout_nodes=1"], "dp=2")
        plan, spec = Plan.parse("dp=2", SPEC.num_layers), SPEC

    assert _chooser_of(Told, "{}", True) is None, "a run is not told seconds of a part as those of its steps"  # type: ignore[arg-type]


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


def resolved(folder: Path, *sets: str) -> ResolvedJob:
    return read_job(None, [*ASKED[:4], f"output_dir={folder}", *ASKED[5:], *sets])


LENGTHS = {"completions/mean_length": 5.0}


def steps(roles: dict[str, float]) -> list[StepRecord]:
    """Five, each of eight rows of 15 tokens, 5 of these sampled."""
    zero = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_second"), 0.0)
    return [
        StepRecord(step=step, tokens=8 * 15, seconds=4.0, metrics=LENGTHS, role_seconds=roles, **zero)  # type: ignore[arg-type]
        for step in range(1, 6)
    ]


def test_a_step_is_told_by_role_for_completions_as_long_as_they_were(tmp_path: Path) -> None:
    survey = survey_of("train", sampling_node("a"))
    chooser = TrainingChooser(resolved(tmp_path), "{}", SPEC, 1, Plan.parse("pp=1", SPEC.num_layers))
    chooser.says = lambda text: None
    chosen = chooser.decide(survey)
    outcome = training_outcome(chooser, steps({"sampling": 2.0, "rewards": 0.5}))
    assert outcome is not None
    measured, predicted = outcome.measured, outcome.predicted
    assert (measured.sampling, measured.rewards, measured.policy, measured.seconds) == (2.0, 0.5, 1.5, 4.0)
    assert predicted.rewards is None and predicted.sampling is not None and predicted.policy is not None
    assert predicted.sampling + predicted.policy == pytest.approx(predicted.seconds)
    longest = dict(chosen.predicted.roles)["sampling"]
    assert 0.1 * longest < predicted.sampling < 0.5 * longest, "5 tokens where 16 were allowed"
    assert predicted.policy < chosen.predicted.policy


def test_an_evaluation_is_predicted_and_measured_beside_the_steps(tmp_path: Path) -> None:
    chooser = chooser_of_texts(tmp_path)
    said = list[str]()
    chooser.says = said.append
    chosen = chooser.decide(survey_of("train", training_node("a")))
    assert "an evaluation: " in said[0]
    told = chooser.predicted_seconds(chosen.placed, chosen.predicted)
    assert told.by_role["evaluation"] == chooser.evaluation_seconds(chosen.placed)
    plain = [msgspec.structs.replace(one, metrics=None) for one in steps({})]
    evaluated = [msgspec.structs.replace(one, eval_seconds=0.5 * one.step) for one in plain[:3]]
    outcome, before = training_outcome(chooser, [*evaluated, *plain[3:]]), training_outcome(chooser, plain)
    assert outcome is not None and before is not None
    assert outcome.predicted.evaluation == told.by_role["evaluation"] and outcome.measured.evaluation == 1.0
    assert before.measured.evaluation is None and "evaluation" not in as_text(before)
    assert re.search(r"^evaluation .* ms\s+1000 ms", as_text(outcome), re.MULTILINE)
    assert (outcome.measured.seconds, outcome.predicted.policy) == (4.0, None), "an evaluation is of no step"


def test_completions_of_evaluations_are_predicted(tmp_path: Path) -> None:
    """Those to be read come on top of the rows; of prompts held out there are as many as completions are asked for."""
    survey, said = survey_of("train", sampling_node("a")), list[str]()
    reads = ("eval_num_prompts=2", "eval_max_new_tokens=8")
    choosers = [chooser_of_texts(tmp_path / "plain"), chooser_of_texts(tmp_path / "read", *reads)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": [1]}) + "\n" for _ in range(6)))
    for number in (2, 4):
        held_out = (f"eval_files={tmp_path}/rows.jsonl", "eval_steps=2", f"grpo.num_generations_eval={number}")
        asked = resolved(tmp_path, *held_out)
        choosers.append(TrainingChooser(asked, "{}", SPEC, 1, Plan.parse("pp=1", SPEC.num_layers)))
    found = list[float]()
    for chooser in choosers:
        chooser.says = said.append
        seconds = chooser.evaluation_seconds(chooser.decide(survey).placed)
        assert seconds is not None and f"an evaluation: {seconds:.3g} s for " in said[-1]
        assert "not predicted" not in said[-1]
        found.append(seconds)
    plain, read, two, four = found
    assert read > plain and four > 1.2 * two
    assert "for 12 rows of eval_files and completions to be read; 5 of them take" in said[1]
    assert "for 4 completions of each of 6 prompts of eval_files" in said[3]
    shorter = replace(choosers[3].chosen.placed, facts=choosers[3].facts())  # type: ignore[union-attr]
    assert shorter.facts.sampling is not None
    shorter = replace(shorter, facts=replace(shorter.facts, sampling=replace(shorter.facts.sampling, completion=4)))
    assert choosers[3].evaluation_seconds(shorter) < 0.7 * four, "as long as steps have found them"  # type: ignore[operator]


def test_completions_that_servers_elsewhere_sample_are_not_predicted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [1]}) + "\n")
    more = (f"eval_files={tmp_path}/rows.jsonl", "grpo.rollout_servers=there:7070")
    plan, said = Plan.parse("pp=1", SPEC.num_layers), list[str]()
    chooser = TrainingChooser(resolved(tmp_path, *more), "{}", SPEC, 1, plan)
    chooser.says = said.append
    chosen = chooser.decide(survey_of("train", sampling_node("a")))
    assert chooser.evaluation_seconds(chosen.placed) is None
    assert "evaluations are longer by 4 completions of each of 1 prompt of eval_files" in said[0]


def test_the_rows_of_a_job_are_read_once_for_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is of the rows that are learned, whose lengths are known by then."""
    small_model("llama", tmp_path / "model")
    pair_rows(tmp_path / "pairs.jsonl")
    read, asked = list[object](), initial_model.sampled_rows
    monkeypatch.setattr(initial_model, "sampled_rows", lambda *rows: read.append(rows) or asked(*rows))
    job = preference_job(tmp_path / "model", tmp_path / "run", "dpo")
    TrainingChooser(ResolvedJob(job, dict.fromkeys(TYPES, DEFAULT)), "{}", spec_of(job), 1)
    assert len(read) == 1


def chooser_of_texts(folder: Path, *more: str) -> TrainingChooser:
    """Of a job that learns texts and has some held out."""
    folder.mkdir(exist_ok=True)
    write_task(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"input_ids": [1] * 20}) + "\n" for _ in range(12)))
    keys = ("task=sft", f"config_name={folder}/config.json", f"tokenizer_name={folder}/tokenizer.json")
    files = (f"train_files={folder}/texts.jsonl", f"eval_files={folder}/texts.jsonl", "eval_steps=2")
    sizes = ("max_steps=9", "seq_len=32", "global_batch_size=8", f"output_dir={folder}/run")
    asked = read_job(None, [*keys, *files, *sizes, *more])
    return TrainingChooser(asked, "{}", SPEC, 1, Plan.parse("pp=1", SPEC.num_layers))


def test_servers_elsewhere_are_in_no_prediction_and_correct_no_survey(tmp_path: Path) -> None:
    asked = resolved(tmp_path, "grpo.rollout_servers=there:7070")
    chooser, said = TrainingChooser(asked, "{}", SPEC, 1, Plan.parse("pp=1", SPEC.num_layers)), list[str]()
    chooser.says = said.append
    chosen = chooser.decide(survey_of("train", sampling_node("a")))
    assert "without the sampling at grpo.rollout_servers: these machines are not measured" in said[0]
    told = chooser.predicted_seconds(chosen.placed, chosen.predicted)
    assert told.by_role == {"policy": chosen.predicted.seconds}
    watch, run = Watch(chooser, moves=False), SimpleNamespace(state=SimpleNamespace(ranks=()))
    for one in steps({"sampling": 2.5, "rewards": 0.5}):
        watch.stepped(one, run)  # type: ignore[arg-type]
    shown = watch.shown()
    assert shown is not None and shown["beside"]["measured"]["seconds"] == 1.5, "of the 4 s that the step took"
    watch.close()


@pytest.mark.parametrize("who", [(), ("grpo.rollout_servers=there:7070",), ("grpo.rollout_nodes=1",)])
def test_a_shared_prompt_is_as_long_as_measured_whoever_samples(tmp_path: Path, who: tuple[str, ...]) -> None:
    chooser = TrainingChooser(resolved(tmp_path, "microbatch_size=4", *who), "{}", SPEC, 1)
    cluster = cluster_of(survey_of("train", sampling_node("a")), SPEC)
    placed = PlacedPlan(SPEC, Plan.parse("pp=1", SPEC.num_layers), chooser.facts(), cluster, (0,))
    assert placed.facts.lengths == (15, 16, 16, 16, 16)
    assert as_long_as_measured(placed, steps({})).facts.lengths == (9, 5, 5, 5, 5)


def test_a_run_that_samples_is_chosen_for_as_any_other(tmp_path: Path) -> None:
    class Told:
        resolved = resolved(tmp_path)
        plan, spec = Plan.parse("dp=2", SPEC.num_layers), SPEC

    chooser = _chooser_of(Told, "{}", True)  # type: ignore[arg-type]
    assert chooser is not None and chooser.given is None and chooser.facts().sampling is not None
