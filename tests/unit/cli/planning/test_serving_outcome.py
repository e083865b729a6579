"""What was predicted beside what was measured, at the end of a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.serving.scripted_engine import ListedEngine
from tests.unit.planner.measured.test_survey import SPEC, serving_node, survey_of
from tllm.api.engine_options import EngineOptions
from tllm.cli.planning.outcome import conclude_serving, serving_outcome
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.outcome import FILE
from tllm.planner.measured.survey import FILE as SURVEY
from tllm.planner.measured.survey import read_survey
from tllm.server.latency import RequestTimes, TimedEngine
from tllm.spec.plan import Plan


def test_answers_of_a_model_that_embeds_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, plan = replace(SPEC, bidirectional=True), Plan.parse("pp=1", SPEC.num_layers)
    options = EngineOptions(Path("model"), spec, plan, "float32", 1, 16, None, None, 8)
    chooser = ServingChooser(options, ServingFacts("float32", 64, 1, whole_prompts=True), tmp_path, 1, plan)
    chooser.decide(survey := survey_of("serve", serving_node("box")))
    timed = TimedEngine(ListedEngine())
    assert serving_outcome(chooser, timed, None) is None, "nothing was asked for"
    timed.times.append(RequestTimes(9, 1.0, 2.0, 3.0, 5))
    timed.pooled += [RequestTimes(32, float(n), n + 0.25, n + 0.25) for n in range(10)]
    outcome = serving_outcome(chooser, timed, None)
    assert outcome is not None
    assert (outcome.requests, outcome.prompt, outcome.reply, outcome.concurrency) == (8, 32, 1, 1)
    assert outcome.predicted.per_token is None and outcome.measured.per_token is None
    assert outcome.measured.first_token == pytest.approx(0.25)
    assert outcome.measured.tokens_per_second == pytest.approx(4)
    assert outcome.predicted.tokens_per_second == pytest.approx(1 / outcome.predicted.first_token)
    capsys.readouterr()
    conclude_serving(chooser, timed, None)
    said = capsys.readouterr().out
    assert "\nanswer " in said and "answers per second" in said and "token" not in said
    assert (tmp_path / FILE).is_file() and read_survey(tmp_path / SURVEY) != survey, "a run corrects it"
