"""What is said while a run goes on, when its machines are no longer what they were."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.planner.measured.test_survey import SPEC, survey_of, training_node
from tllm.cli.planning.plan_advice import Advice, Adviser, changes
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.cli.planning.run_watch import Watch
from tllm.cluster.settings import PredictedSeconds
from tllm.core.errors import CapacityError, PlanError
from tllm.node.train.elastic_run import ElasticRun
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.measured.outcome import WARM
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.drift import BEGINNING, LATELY, Slowdown
from tllm.planner.search.training_search import TrainingChoice, best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob
from tllm.training.report.metrics import StepRecord

SURVEY = survey_of("train", training_node("box"), training_node("pi"))
FACTS = TrainingFacts(32, 8, 2)


class Chooser:
    """One whose run goes on under an even plan."""

    def __init__(self) -> None:
        self.survey, self.spec, self.refused = SURVEY, SPEC, set[str]()
        cluster = cluster_of(SURVEY, SPEC)
        placed = PlacedPlan(SPEC, Plan.parse("dp=2", SPEC.num_layers), FACTS, cluster, (0, 1))
        self.chosen = TrainingChoice(placed, placed.predict(), tuple(placed.memory()))
        self.resolved = ResolvedJob(Job("run", ("rows.jsonl",), max_steps=1, config_name="config.json"), {})
        self.sizes: list[tuple[int, ...]] = []

    def best_as_chosen(self, cluster: Cluster, sizes: tuple[int, ...]) -> TrainingChoice:
        self.sizes.append(sizes)
        return best_training(SPEC, cluster, FACTS, steps=5000).choices[0]

    def predicted_seconds(self, placed: PlacedPlan, predicted: StepPrediction) -> PredictedSeconds:
        return PredictedSeconds(str(placed.plan), {"step": predicted.seconds})


def record(seconds: float) -> StepRecord:
    zero: dict[str, Any] = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_second"), 0.0)
    return StepRecord(step=1, tokens=1, seconds=seconds, **zero)


async def heard(adviser: Adviser, seconds: float, computing: tuple[float, ...], steps: int) -> list[Advice]:
    found = []
    for _ in range(steps):
        found.append(adviser.stepped(record(seconds), computing))
        while adviser._task is not None and not adviser._task.done():
            await asyncio.sleep(0.01)
    return [advice for advice in found if advice is not None]


def test_a_node_that_becomes_slow_is_named_with_a_plan_that_gains() -> None:
    chooser = Chooser()
    adviser = Adviser(chooser)  # type: ignore[arg-type]

    async def scene() -> list[Advice]:
        assert await heard(adviser, 1.0, (0.9, 0.9), WARM + BEGINNING + LATELY) == []
        return await heard(adviser, 4.0, (0.9, 3.6), LATELY + 2)

    (advice,) = asyncio.run(scene())
    assert "pi takes 4 times as long to compute as in the beginning: plan" in advice.text
    assert "box takes" not in advice.text
    assert advice.move is not None and f"plan {advice.move[0].placed.plan} on" in advice.text
    box, pi = zip(advice.move[1].nodes, SURVEY.nodes, strict=True)
    assert box[0] == box[1] and pi[0].layers[0].seconds == pytest.approx(4 * pi[1].layers[0].seconds)
    assert "% faster" in advice.text
    assert chooser.sizes == [(2,)], "microbatches stay as they are"
    assert asyncio.run(heard(adviser, 1.0, (0.9, 0.9), 20)) == [], "a word a minute"
    (again,) = asyncio.run(heard(adviser, 1.0, (0.9, 0.9), 2 * LATELY))
    assert "all is again as in the beginning: no other plan" in again.text or "would be" in again.text


def test_a_run_goes_on_where_no_plan_is_found_for_machines_as_they_are_now() -> None:
    """A plan that was given may be of a form that is not searched, or seem to need more memory than there is."""
    chooser = Chooser()

    def none_fits(cluster: Cluster, sizes: tuple[int, ...]) -> TrainingChoice:
        raise CapacityError("no plan that was looked at fits")

    chooser.best_as_chosen = none_fits  # type: ignore[method-assign]
    adviser = Adviser(chooser)  # type: ignore[arg-type]

    async def scene() -> list[Advice]:
        await heard(adviser, 1.0, (0.9, 0.9), WARM + BEGINNING + LATELY)
        return await heard(adviser, 4.0, (0.9, 3.6), LATELY + 2)

    (advice,) = asyncio.run(scene())
    assert advice.move is None and "pi takes 4 times as long to compute" in advice.text
    assert "no other plan is found: no plan that was looked at fits" in advice.text


def test_nothing_is_worked_out_for_ranks_that_are_not_all_there() -> None:
    adviser = Adviser(Chooser())  # type: ignore[arg-type]
    assert asyncio.run(heard(adviser, 1.0, (0.9,), 50)) == []


@pytest.mark.parametrize(
    ("drift", "words"),
    [
        (Slowdown((1.0, 2.5)), ["b takes 2.5 times as long to compute as in the beginning"]),
        (Slowdown((1.0, 0.5)), ["b takes 0.5 times as long to compute as in the beginning"]),
        (Slowdown((1.1, 1.0), 3.0), ["messages take 3 times as long"]),
        (Slowdown((1.0, 1.0)), ["all is again as in the beginning"]),
    ],
)
def test_what_has_changed_in_words(drift: Slowdown, words: list[str]) -> None:
    assert changes(drift, ["a", "b"]) == words


def test_a_search_that_nobody_waits_for_is_dropped() -> None:
    async def scene() -> None:
        adviser = Adviser(Chooser())  # type: ignore[arg-type]
        adviser._task = asyncio.create_task(asyncio.sleep(60))  # type: ignore[arg-type]
        adviser.close()
        await asyncio.wait([adviser._task], timeout=20)
        assert adviser._task.cancelled()

    asyncio.run(scene())


class Moved(ElasticRun):
    """A run that only hears where it is to move."""

    def __init__(self) -> None:
        self.plans = list[str]()
        self.recovery = SimpleNamespace(is_open=True)  # type: ignore[assignment]
        self.coordinator = SimpleNamespace(state=SimpleNamespace(ranks=()))  # type: ignore[assignment]

    def move(self, plan: Plan, nodes: Sequence[str], predicted: PredictedSeconds | None = None) -> None:
        assert predicted is not None and predicted.plan == str(plan)
        self.plans.append(str(plan))


def watched(chooser: Chooser, advice: Callable[[], Advice], run: Moved, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch(chooser, moves=True)  # type: ignore[arg-type]
    monkeypatch.setattr(watch._adviser, "stepped", lambda record, computing: advice())
    assert "moves to it" in watch.stepped(record(1.0), run)
    return watch


def test_a_plan_that_could_not_begin_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser()
    given = chooser.chosen
    best = chooser.best_as_chosen(cluster_of(SURVEY.slower(2), SPEC), ())
    assert str(best.placed.plan) != str(given.placed.plan)
    run = Moved()
    watch = watched(chooser, lambda: Advice("", (best, SURVEY.slower(2))), run, monkeypatch)
    assert run.plans == [str(best.placed.plan)] and chooser.chosen is best
    watch.resumed(str(given.placed.plan))
    assert chooser.refused == {str(best.placed.plan)}
    assert str(chooser.chosen.placed.plan) == str(given.placed.plan)
    slower = chooser.chosen.predicted.seconds / given.predicted.seconds
    assert slower > 1.5, "of machines as they are now"


def test_a_plan_that_began_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser()
    best = chooser.best_as_chosen(cluster_of(SURVEY, SPEC), ())
    watch = watched(chooser, lambda: Advice("", (best, SURVEY)), Moved(), monkeypatch)
    watch.resumed(str(best.placed.plan))
    assert chooser.chosen is best and chooser.refused == set()


def test_a_chooser_refuses_what_could_not_begin(tmp_path: Path) -> None:
    job = Job(train_files=("data.jsonl",), config_name="config.json", output_dir=str(tmp_path), max_steps=1)
    resolved = ResolvedJob(job, {"microbatch_size": "default"})
    chooser = TrainingChooser(resolved, "{}", SPEC, 2)
    plan = Plan.parse("pp=2", SPEC.num_layers)
    chooser._refuse(plan, FACTS)
    chooser.refused.add(str(plan))
    with pytest.raises(PlanError, match="could not begin"):
        chooser._refuse(plan, FACTS)
