"""Runs of one rank are predicted too: where a survey was kept, or where keeping one is asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from tests.support.models.families import save_model
from tests.support.training.small_job import write_job
from tests.unit.planner.measured.test_survey import survey_of, training_node
from tllm.api.engine_options import EngineOptions, read_spec
from tllm.api.trainer import Trainer
from tllm.cli.arguments.options import ACCEPTANCE
from tllm.cli.commands import train
from tllm.cli.commands.serve import _chooser as serving_chooser
from tllm.cli.commands.train import _chooser_of as training_chooser
from tllm.cli.main import main
from tllm.cluster.settings import TrainSettings, Wiring
from tllm.engine.schedule.step_cost import StepCost
from tllm.planner.measured.outcome import FILE as OUTCOME
from tllm.planner.measured.outcome import ServingOutcome
from tllm.planner.measured.survey import FILE, digest
from tllm.spec.plan import Plan


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model("llama", folder)
    return folder


def test_a_reply_is_predicted_beside_its_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tllm.cli.arguments.survey_settings.NODE_SECONDS", 0.1)
    asked = ["generate", str(model), "--prompt-ids", "1,2,3", "--max-tokens", "12", "--threads", "1", "--quiet"]
    assert main(asked) == 0
    plain = capsys.readouterr()
    assert "predicted" not in plain.err, "who did not ask does not wait"
    assert main([*asked, "--keep", str(tmp_path / "kept")]) == 0
    said = capsys.readouterr()
    assert said.out == plain.out
    assert "ms a token" in said.err and "measured is" in said.err
    outcome = msgspec.json.decode((tmp_path / "kept" / OUTCOME).read_bytes(), type=ServingOutcome)
    assert (outcome.plan, outcome.requests, outcome.prompt) == ("pp=1,tp=1,layers=4", 1, 3)
    monkeypatch.setattr("tllm.node.coordinator.survey_cluster.examined", None)  # which is called no more
    before = (tmp_path / "kept" / FILE).read_bytes()
    assert main([*asked, "--keep", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "kept" / FILE).read_bytes() != before, "a run corrects it"


def test_what_was_right_of_drafts_takes_the_place_of_what_was_expected(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each draft is checked here: whether drafts pay is measured, and with it would change how many were right."""
    monkeypatch.setattr("tllm.cli.arguments.survey_settings.NODE_SECONDS", 0.1)
    for decision in ("row_pays", "drafts_pay"):
        monkeypatch.setattr(StepCost, decision, lambda *of: True)
    asked = ["generate", str(model), "--prompt-ids", ",".join(["1,2,3"] * 8), "--max-tokens", "40", "--threads", "1"]
    asked += ["--ignore-eos", "--temperature", "0", "--quiet"]
    assert main(asked) == 0
    plain = capsys.readouterr().out
    assert main([*asked, "--num-speculative-tokens", "4", "--keep", str(tmp_path / "kept")]) == 0
    said = capsys.readouterr()
    assert said.out == plain, "drafts change no token"
    outcome = msgspec.json.decode((tmp_path / "kept" / OUTCOME).read_bytes(), type=ServingOutcome)
    assert outcome.acceptance is not None
    assert outcome.acceptance != ACCEPTANCE and 0 <= outcome.acceptance <= 1
    assert f"{100 * outcome.acceptance:.3g} % of drafted tokens were right" in said.err


def test_a_server_of_one_rank_is_predicted_where_it_keeps_what_it_measures(model: Path, tmp_path: Path) -> None:
    spec = read_spec(model)
    plan = Plan.parse("pp=1", spec.num_layers)
    options = EngineOptions(model, spec, plan, "float32", 1, 16, None, None, 8)
    load = dict(prompt=8, reply=8, concurrency=1, leave_out="auto", cluster_folder=None)
    load |= dict(num_speculative_tokens=0, acceptance=0.3, kv_cache_dtype="auto", speculative_config=None)
    args = argparse.Namespace(nodes=None, local=None, plan=None, keep=tmp_path, **load)
    chooser = serving_chooser(args, options)
    assert chooser is not None and chooser.given == plan and chooser.nodes == 1
    args.keep = None
    assert serving_chooser(args, options) is None


def test_training_on_one_rank_is_predicted_by_a_survey_that_was_kept(tmp_path: Path) -> None:
    trainer = Trainer(write_job(tmp_path), ranks=1)
    spec, plan = trainer.spec, trainer.plan
    assert training_chooser(trainer, "", True) is None
    survey = msgspec.structs.replace(survey_of("train", training_node("here")), model=digest(spec))
    survey.save(tmp_path / "run" / FILE)
    chooser = training_chooser(trainer, "", True)
    assert chooser is not None and chooser.given == plan and chooser.recalled() == survey
    two = survey_of("train", training_node("here"), training_node("pi"))
    msgspec.structs.replace(two, model=digest(spec)).save(tmp_path / "run" / FILE)
    assert training_chooser(trainer, "", True) is None, "of other machines"


def test_a_chosen_training_plan_has_the_links_and_times_that_were_asked_for(tmp_path: Path) -> None:
    """The plan is chosen when the nodes are here; what carries tensors, and how long one waits, stays as it was."""
    words = [str(write_job(tmp_path)), "--nodes", "2", "--link", "grpc", "--lost-after", "400", "--allow-mixed"]
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(words)
    trainer = Trainer(args.job, ranks=2)
    chooser = train._chooser(args, trainer, trainer.config, True)
    assert chooser is not None
    survey = survey_of("train", training_node("here"), training_node("there"))
    work, _ = chooser(msgspec.structs.replace(survey, model=digest(trainer.spec)))
    assert isinstance(work.settings, TrainSettings)
    assert work.settings.wiring == Wiring("grpc")
    assert (work.settings.link_seconds, work.lost_after, work.allow_mixed) == (800.0, 400.0, True)
