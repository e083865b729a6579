"""`tllm train --dry-run` shows the plan that the run would take, or says what it is not known for."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.training.post_training.preferences import small_model
from tests.support.training.small_job import write_job
from tests.unit.planner.measured.test_survey import survey_of, training_node
from tllm.cli.main import main
from tllm.core.errors import ConfigError
from tllm.planner.measured.survey import FILE, digest
from tllm.spec.families import spec_from_config
from tllm.training.state.initial_weights import parameter_count

LOCAL = ["--local", "2", "--dry-run", "--threads", "1"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def keep_survey(job: Path) -> None:
    """One of two nodes, of which one is far too slow to be of use."""
    spec = spec_from_config(json.loads((job.parent / "config.json").read_text()))
    survey = survey_of("train", training_node("box"), training_node("pi").slower(50))
    (job.parent / "run").mkdir()
    msgspec.structs.replace(survey, model=digest(spec)).save(job.parent / "run" / FILE)


def test_a_layer_is_timed_on_the_device_that_is_asked_for(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, second = list[object](), torch.device("cuda", 1)

    def layer_speed(*asked: object) -> float:
        told.append(asked[-1])
        return 1e12

    monkeypatch.setattr("tllm.devices.choose.choose_device", lambda wanted, place=0: second)
    monkeypatch.setattr("tllm.devices.choose.compute_on", lambda device: told.append(("thread", device)))
    monkeypatch.setattr("tllm.devices.memory.device_name", lambda device: "cuda:1 Some GPU")
    monkeypatch.setattr("tllm.training.measure.pass_speed.layer_speed", layer_speed)
    assert main(["train", str(job), "--plan", "dp=1", "--dry-run", "--device", "cuda:1"]) == 0
    assert told == [("thread", second), second] and "reaches here on cuda:1 Some GPU" in capsys.readouterr().out


def test_ways_to_cut_a_layer_are_compared_by_what_they_send(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A square sends less than one dimension only where a microbatch has many tokens; no other grid has four ranks."""
    for tokens, plan, least in ((16, "tp=4", "1d"), (128, "tp=4", "2d"), (128, "tp=4,tensor=2d", "2d")):
        sizes = ["--set", "microbatch_size=1", "--set", f"seq_len={tokens}"]
        assert main(["train", str(job), "--plan", plan, "--dry-run", "--threads", "1", *sizes]) == 0
        out = capsys.readouterr().out
        assert f"a microbatch of {tokens} tokens" in out and f"tensor={least} sends the fewest bytes" in out
        assert [line.split()[:2] for line in out.split("messages\n")[1].splitlines()[:2]] == [
            ["1d", "4"],
            ["2d", "2x2"],
        ]
        assert "predicted: " in out
    assert main(["train", str(job), "--plan", "tp=2,dp=2", "--dry-run", "--threads", "1"]) == 0
    assert "tensor" not in capsys.readouterr().out


def test_what_a_save_takes_stands_beside_what_is_free(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and both of AdamW's states, once for all ranks."""
    spec = spec_from_config(json.loads((job.parent / "config.json").read_text()))
    takes, keeps = 3 * 4 * parameter_count(spec) / 1024, ["--set", "save_total_limit=4"]
    for plan, more in (("pp=1", 1.0), ("dp=2,zero=1", 1.02)):  # what several ranks hold one writes
        assert main(["train", str(job), "--plan", plan, "--dry-run", "--threads", "1", *keeps]) == 0
        out = capsys.readouterr().out
        found = re.search(rf"a save: ([\d.]+) KiB at most, up to 5 at once; {job.parent} here has .* free", out)
        assert found is not None and takes - 0.1 < float(found[1]) < more * takes + 0.1


def test_a_reference_that_is_computed_before_the_first_step_is_counted(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of each step's passes, which are all of a step that waits for nobody."""
    (job.parent / "pages.jsonl").unlink()  # of whose rows nothing is known then, so that they are full
    dry = ["train", str(job), "--plan", "pp=1", "--dry-run", "--threads", "1"]
    for task, is_counted in (("dpo", True), ("simpo", False)):
        assert main([*dry, "--set", f"task={task}", "--set", "max_steps=3000"]) == 0
        out = capsys.readouterr().out
        step = re.search(r"predicted: ([\d.e-]+) s a step", out)
        before = re.search(r"before the first step: the reference's forward pass, ([\d.e+]+) s at most", out)
        assert step is not None and (before is not None) == is_counted
        if before is not None:
            assert float(before[1]) == pytest.approx(3000 * float(step[1]) / 3, rel=0.05)


def test_evaluations_are_counted_beside_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """600 tokens fill ten rows of 64, for which two replicas compute three microbatches of two each. That is a third of
    what steps of as many rows take; beside an adapter, whose steps are shorter, half."""
    small_model("llama", tmp_path / "model")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"input_ids": [1] * 20}) + "\n" for _ in range(30)))
    (tmp_path / "rows.py").write_text("def held_out(): return []")
    job = tmp_path / "job.toml"
    named = f'model_name_or_path = "{tmp_path}/model"\ntrain_files = ["{held_out}"]\noutput_dir = "{tmp_path}/run"\n'
    job.write_text(f"{named}max_steps = 60\nseq_len = 64\nglobal_batch_size = 8\nmicrobatch_size = 2\n")
    dry = ["train", str(job), "--plan", "dp=2", "--dry-run", "--threads", "1"]
    evaluated = ["--set", f"eval_files={held_out}", "--set", "eval_steps=25"]
    line = r"an evaluation: ([\d.e-]+) s for 30 rows of eval_files; 3 of them take ([\d.e-]+) s"
    for adapter, share in (([], 1 / 3), (["--set", "lora.r=4"], 1 / 2)):
        assert main([*dry, *evaluated, *adapter]) == 0
        out = capsys.readouterr().out
        found, step = re.search(line, out), re.search(r"compute ([\d.e-]+)", out)
        assert found is not None and step is not None
        once, thrice = map(float, found.groups())
        assert thrice == pytest.approx(3 * once, rel=0.02)
        assert once == pytest.approx(share * float(step[1]) * 12 / 8, rel=0.1)
    reads = ["--set", "eval_num_prompts=2", "--set", "eval_max_new_tokens=4"]
    for more, unknown in (
        (["--set", "eval_files=rows:held_out"], "rows of eval_files"),
        ([*evaluated, *reads], "completions to be read"),
    ):
        assert main([*dry, *more]) == 0
        assert f"evaluations are longer by {unknown}, which are not predicted" in capsys.readouterr().out
    assert main(dry) == 0
    assert "an evaluation: " not in capsys.readouterr().out


def test_without_a_survey_it_says_what_would_choose(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(job), *LOCAL]) == 0
    out = capsys.readouterr().out
    assert "no plan is given" in out and "measures them when they are here" in out
    assert f"--goal train --nodes 2 --keep {job.parent / 'run'} --batch 8 --seq 64 --dtype float32" in out
    assert "dp=2" in out and "predicted: " in out
    assert not (job.parent / "run").exists()


def test_what_would_choose_is_quoted_for_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my runs").mkdir()
    job = write_job(tmp_path / "my runs")
    assert main(["train", str(job), *LOCAL]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  tllm plan ")]
    measures, describes = map(shlex.split, lines)
    assert measures[measures.index("--keep") + 1] == str(job.parent / "run")
    assert measures[2] == describes[2] == str(job.parent / "config.json")


def test_by_a_survey_it_shows_what_the_run_would_take(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_survey(job)
    before = (job.parent / "run" / FILE).read_bytes()
    assert main(["train", str(job), *LOCAL]) == 0
    out = capsys.readouterr().out
    assert "survey.json was measured, on box pi:" in out
    assert "plan pp=1,tp=1,layers=2 with microbatches of" in out and "plan pp=1,tp=1,layers=2: 1 rank" in out
    assert (job.parent / "run" / FILE).read_bytes() == before


def test_a_survey_of_other_machines_is_not_taken(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_survey(job)
    assert main(["train", str(job), *LOCAL[:1], "3", *LOCAL[2:], "--set", "global_batch_size=6"]) == 0
    assert "is no survey of this model on 3 machines" in capsys.readouterr().out


def test_a_plan_that_is_given_stays(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So do the nodes that are to have a role beside it: they are shown with what they hold."""
    keys = (f"teacher_model_name_or_path={job.parent}", "teacher_nodes=2", "teacher_plan=pp=2")
    taught = ["--set", "task=distill", *(word for key in keys for word in ("--set", f"distill.{key}"))]
    assert main(["train", str(job), "--plan", "pp=2", "--local", "4", "--dry-run", "--threads", "1", *taught]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^teacher: 2 nodes, by pp=2,\S* together, 2\d\d\S* MiB at most on each$", out, re.MULTILINE), out
    assert "no plan is given" not in out and "plan pp=2,tp=1+1,layers=1+1: 2 ranks" in out


@pytest.mark.parametrize("role", ["sampling", "the teacher"])
def test_the_command_that_measures_other_roles_works_as_it_is_printed(
    job: Path, role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tllm plan JOB.toml` alone was refused: it knows no machines."""
    (job.parent / "prompts.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c"}\n')
    keys: dict[str, object] = {"task": "distill", "distill.teacher_model_name_or_path": str(job.parent)}
    if role == "sampling":
        keys = {"task": "grpo", "train_files": [str(job.parent / "prompts.jsonl")], "grpo.num_generations": 4}
        keys |= {"grpo.max_completion_length": 8, "grpo.reward_funcs": ["rewards.py:one"]}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert main(["train", str(job), "--plan", "dp=2", "--dry-run", "--threads", "1", *words]) == 0
    told = re.search(role + r" comes on top, which `tllm (.*)` measures$", capsys.readouterr().out, re.MULTILINE)
    assert told is not None
    given = shlex.split(told[1])
    assert given == ["plan", str(job), "--local", "2", *words, "--plan", "dp=2"]

    def measured(*asked: object) -> object:
        raise ConfigError("as asked, it measures")

    monkeypatch.setattr("tllm.cli.planning.job_plan.measured", measured)
    assert main(given) == 2
    assert "as asked, it measures" in capsys.readouterr().err
