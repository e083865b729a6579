"""Without a plan the machines are measured, the best plan is taken, and its prediction is held against what came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.models.families import save_model
from tests.support.training.small_job import write_job
from tllm.api.engine_options import EngineOptions, engine_config, read_spec
from tllm.api.open_engine import cluster_options, open_nodes
from tllm.cli.main import main
from tllm.cli.planning.outcome import conclude_serving
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.engine.engine import Engine
from tllm.planner.cost.cache_room import RUNTIME_BYTES, batch_tokens, context_of, working_bytes
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.outcome import ServingOutcome, TrainingOutcome
from tllm.planner.measured.survey import read_survey
from tllm.server.latency import TimedEngine
from tllm.spec.plan import Plan
from tllm.spec.request import Request, SamplingParams
from tllm.training.report.metrics import read_records

pytestmark = [
    pytest.mark.timeout(300),  # each starts several processes that load torch
    pytest.mark.usefixtures("own_process"),
]

PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm.cli.arguments.survey_settings.NODE_SECONDS", 0.3)
    monkeypatch.setattr("tllm.cli.arguments.survey_settings.WAY_SECONDS", 0.1)


def test_a_server_takes_the_best_plan_and_says_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model("llama", folder)
    spec = read_spec(folder)
    plan = Plan.parse("pp=2", spec.num_layers)
    options = EngineOptions(folder, spec, plan, "float32", 1, 16, None, None, 8)
    with Engine.load(folder, "pp=1", engine_config(options)) as engine:
        truth = engine.generate([PROMPT], GREEDY)[0]
    chooser = ServingChooser(options, ServingFacts("float32", 8, 12, 1), tmp_path / "kept", 2)

    async def scene() -> None:
        async with (
            asyncio.timeout(200),
            open_nodes(options, cluster_options(options), choice=chooser.choice()) as client,
        ):
            timed = TimedEngine(client)
            for number in range(4):
                request = Request(id=str(number), prompt_ids=PROMPT, params=GREEDY)
                got = [token async for output in timed.submit(request) for token in output.token_ids]
                assert got == truth
            assert chooser.chosen is not None and str(chooser.chosen.plan) == timed.status()["plan"]
            conclude_serving(chooser, timed, None)

    asyncio.run(scene())
    said = capsys.readouterr().out
    assert "predicted:" in said and "the time goes to" in said and "measured" in said
    outcome = msgspec.json.decode((tmp_path / "kept" / "prediction.json").read_bytes(), type=ServingOutcome)
    assert (outcome.requests, outcome.prompt, outcome.reply, outcome.concurrency) == (2, 5, 12, 1)
    ranks = rank_bytes(spec, Plan.parse(outcome.plan, spec.num_layers), "float32")
    longest = context_of(spec, None)
    tokens = min(batch_tokens(spec, longest), longest * options.max_num_seqs)
    held = RUNTIME_BYTES + max(
        rank.weights
        + rank.kv_per_token * chooser.cache_tokens
        + working_bytes(spec, rank, "float32", tokens, options.max_num_seqs)
        for rank in ranks
    )
    assert outcome.predicted.memory == held, "with what the engine computes with for all of its sequences"
    survey = read_survey(tmp_path / "kept" / "survey.json")
    assert survey is not None and [node.node for node in survey.nodes] == ["local-0", "local-1"]


@pytest.mark.slow
def test_a_run_takes_the_best_plan_and_its_second_start_knows_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, max_steps=6)
    assert main(["train", str(job), "--local", "2", "--threads", "1"]) == 0
    first = capsys.readouterr().out
    assert "measuring them for a plan" in first and "with microbatches of 2" in first, "the job's own size stays"
    outcome = msgspec.json.decode((tmp_path / "run" / "prediction.json").read_bytes(), type=TrainingOutcome)
    assert outcome.steps == 4
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, 7))
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert starts[0]["plan"] == outcome.plan
    corrected = read_survey(tmp_path / "run" / "survey.json")

    monkeypatch.setattr("tllm.node.coordinator.survey.Examiner.survey", refuse)
    given = ["--plan", outcome.plan] if "=2" in outcome.plan else []  # else the machines are not those that it names
    assert main(["train", str(job), "--local", "2", "--threads", "1", "--set", "max_steps=9", *given]) == 0
    assert ("as given" in capsys.readouterr().out) == bool(given)
    again = msgspec.json.decode((tmp_path / "run" / "prediction.json").read_bytes(), type=TrainingOutcome)
    assert corrected is not None
    if again.plan == outcome.plan:
        assert again.predicted.seconds == pytest.approx(outcome.measured.seconds, rel=0.01)
    else:
        assert not given and again.predicted.seconds <= outcome.measured.seconds * 1.01


async def refuse(*_: Any) -> AsyncIterator[None]:
    raise AssertionError("the machines are known")
