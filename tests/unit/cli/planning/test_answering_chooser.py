"""The plan that `tllm teach` and `tllm rollout` choose by a survey, and what they tell of it once they answered."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.models.families import save_model
from tests.unit.planner.measured.test_survey import serving_node, survey_of
from tllm.cli.planning import answering_chooser
from tllm.cli.planning.answering_chooser import AnsweringChooser, answering_outcome, tell_answers
from tllm.cli.planning.outcome import conclude_answering
from tllm.cluster.settings import AnswerSettings
from tllm.core.errors import PlanError
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.answering_cluster import Answerers
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.measured.outcome import FILE, AnsweringOutcome
from tllm.planner.measured.survey import read_survey
from tllm.planner.roles.answering_plans import AnsweringLoad, GroupLoad, RowLoad
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.training.questions.answering_model import AnsweringModel

SURVEY = survey_of("serve", serving_node("box"), serving_node("pi", speed=0.5))
TIMED = {"timed": 4.0, "answer_seconds": 2.0, "row_tokens": 120.0}


def chooser_of(folder: Path, role: RoleName = "teacher", kept: Path | None = None, **more: bool) -> AnsweringChooser:
    """Of a tiny model, which two machines hold."""
    save_model("llama", folder)
    model = AnsweringModel.find_causal(str(folder), "", "")
    plan = Plan.parse("pp=2", model.spec.num_layers)
    answerers = Answerers(role, "model", model, plan, ("127.0.0.1", 1), folder / "key", "float32")
    load: AnsweringLoad = RowLoad.of(model.spec, "float32", 32)
    if role == "rollout":
        load = GroupLoad.of(model.spec, "float32", SamplingFacts(8, 16, 2, 4, 8, 24))
    chooser = AnsweringChooser(answerers, load, ClusterOptions(authority=kept), 2, **more)
    chooser.said = []  # type: ignore[attr-defined]
    chooser.says = chooser.said.append  # type: ignore[attr-defined]
    return chooser


@pytest.mark.parametrize(
    ("role", "about"),
    [("teacher", "a row of 32 tokens"), ("rollout", "4 completions of 16 tokens of a prompt of 8, for 2 prompts")],
)
def test_the_plan_that_is_predicted_fastest_is_taken_and_told(role: RoleName, about: str, tmp_path: Path) -> None:
    chooser: Any = chooser_of(tmp_path, role)
    work, devices = chooser(SURVEY)
    assert isinstance(work.settings, AnswerSettings) and work.settings.role == role
    assert work.plan == chooser.chosen.plan and devices == chooser.chosen.devices and devices[0] == 0
    plan, predicted, *rest = chooser.said[0].splitlines()
    assert plan.startswith(f"plan {work.plan} on box") and predicted.startswith("predicted: ")
    assert f"{chooser.chosen.seconds:.3g} s for {about}, " in predicted and predicted.endswith("at most on a node")
    assert (len(devices) == 1) == any("left out: pi; all 2 together would take" in line for line in rest)
    everyone: Any = chooser_of(tmp_path, role, leave_out=False)
    _, devices = everyone(SURVEY)
    assert len(devices) == 2 and everyone.chosen.seconds >= chooser.chosen.seconds
    small = msgspec.structs.replace(SURVEY.nodes[1], memory_bytes=2**20)
    with pytest.raises(PlanError, match="no plan was found that uses all 2 nodes"):
        everyone(msgspec.structs.replace(SURVEY, nodes=(SURVEY.nodes[0], small)))


def test_nodes_measure_what_the_answers_are_made_of(tmp_path: Path) -> None:
    teacher, rollout = (chooser_of(tmp_path, role).asked().settings for role in ("teacher", "rollout"))
    assert (teacher.length, teacher.rows, teacher.sequences) == (32, (32,), (1, 32)), "a row, and logits of many"
    assert (rollout.length, rollout.rows, rollout.sequences) == (8, (8,), (1, 8)), "prompts, and all completions"


def test_predictions_are_for_answers_like_those_that_were_given(tmp_path: Path) -> None:
    chooser: Any = chooser_of(tmp_path)
    chooser.decide(SURVEY)
    plan = str(chooser.chosen.plan)
    found = answering_outcome(chooser, plan, TIMED, 123)
    assert found is not None and (found.answers, found.about) == (4, "a row of 30 tokens")
    assert (found.measured.seconds, found.measured.tokens_per_second, found.measured.memory) == (0.5, 60, 123)
    row = RowLoad.of(chooser.spec, "float32", 30)
    want = row.seconds(answering_chooser.cluster_of(SURVEY, chooser.spec), chooser.chosen.plan, chooser.chosen.devices)
    assert found.predicted.seconds == want != chooser.chosen.seconds
    assert answering_outcome(chooser, plan, {"answered": 2.0}, 123) is None, "weights alone"
    assert answering_outcome(chooser, "pp=1 of others", TIMED, 123) is None, "that plan was not predicted"
    sampler: Any = chooser_of(tmp_path, "rollout")
    sampler.decide(SURVEY)
    stats = {"timed": 2.0, "answer_seconds": 3.0, "prompts": 6.0, "prompt_tokens": 30.0, "completions": 12.0}
    told = answering_outcome(sampler, str(sampler.chosen.plan), {**stats, "completion_tokens": 96.0}, None)
    assert told is not None and told.about == "2 completions of 8 tokens of a prompt of 5, for 3 prompts"
    assert told.measured.tokens_per_second == 96 / 3


def test_at_the_end_both_are_printed_and_kept_and_the_survey_is_corrected(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    chooser: Any = chooser_of(tmp_path, kept=kept)
    chooser.decide(SURVEY)
    conclude_answering(chooser, str(chooser.chosen.plan), TIMED, 2**20)
    assert "4 answers, each a row of 30 tokens:" in chooser.said
    table = next(text for text in chooser.said if "predicted" in text and "measured is" in text)
    assert "seconds" in table and "tokens per second" in table and "1.0 MiB" in table
    written = msgspec.json.decode((kept / FILE).read_bytes(), type=AnsweringOutcome)
    assert written.measured.seconds == 0.5
    again: Any = chooser_of(tmp_path, kept=kept)
    survey = read_survey(kept / "survey.json")
    assert survey is not None and survey != SURVEY
    again.decide(survey)
    corrected = answering_outcome(again, str(chooser.chosen.plan), TIMED, None)
    off = 0.5 / written.predicted.seconds
    assert corrected is not None and corrected.predicted.seconds == pytest.approx(0.5 if off < 8 else 8 / off, rel=0.2)


def test_while_runs_are_answered_the_log_tells_both_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chooser: Any = chooser_of(tmp_path)
    chooser.decide(SURVEY)
    counts = iter((2, 8, 9, 15, 17, 17))
    monkeypatch.setattr(answering_chooser, "LOOK_SECONDS", 0.0)

    class Cluster:
        def answered(self) -> tuple[str, dict[str, float], None]:
            count = next(counts)
            return str(chooser.chosen.plan), {"timed": count, "answer_seconds": count, "row_tokens": 30.0 * count}, None

    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(tell_answers(chooser, Cluster()))  # type: ignore[arg-type]
    told = [message for message in caplog.messages if "answers took" in message]
    assert [message.split()[0] for message in told] == ["8", "17"]
    assert "answers took 1 s each, predicted" in told[0] and told[0].endswith("for a row of 30 tokens")
