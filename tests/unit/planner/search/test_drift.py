"""A rank that becomes slow in mid-run is seen, named, and planned around."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.planner.measured.test_survey import SPEC, survey_of, training_node
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.measured.outcome import WARM
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.drift import BEGINNING, LATELY, DriftDetector, Slowdown, replan_gain, slowed_survey
from tllm.planner.search.training_search import TrainingChoice, best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.plan import Plan

SURVEY = survey_of("train", training_node("a"), training_node("b"))


def steps(drift: DriftDetector, seconds: float, computing: tuple[float, ...], count: int = LATELY) -> list[Slowdown]:
    """What is new after each of some steps."""
    found = []
    for _ in range(count):
        drift.record_step(seconds, computing)
        found.append(drift.new_slowdown())
    return [one for one in found if one is not None]


def begun(drift: DriftDetector, seconds: float = 1.0, computing: tuple[float, ...] = (0.8, 0.8)) -> DriftDetector:
    assert not steps(drift, 50.0, (40.0, 40.0), WARM), "the first steps are slow anywhere"
    assert not steps(drift, seconds, computing, BEGINNING + LATELY), "nothing has changed"
    return drift


def test_a_slow_rank_is_seen_once_and_its_recovery_too() -> None:
    drift = begun(DriftDetector(2))
    (one,) = steps(drift, 1.8, (0.8, 1.6))
    assert one.rank_factors == (1.0, pytest.approx(2.0)) and one.link_factor == pytest.approx(1.0)
    assert [slowed_survey.rank_factors for slowed_survey in steps(drift, 1.0, (0.8, 0.8), 2 * LATELY)] == [(1.0, 1.0)]


def test_slow_links_are_not_taken_for_slow_ranks() -> None:
    drift = begun(DriftDetector(2))
    (one,) = steps(drift, 1.4, (0.8, 0.8))
    assert one.rank_factors == (1.0, 1.0) and one.link_factor == pytest.approx(3.0)


def test_one_slow_step_is_no_change() -> None:
    drift = begun(DriftDetector(2))
    assert not steps(drift, 9.0, (8.0, 8.0), 1) and not steps(drift, 1.0, (0.8, 0.8))


def test_waits_that_are_next_to_nothing_are_not_compared() -> None:
    drift = begun(DriftDetector(2), 0.8001, (0.8, 0.8))
    assert not steps(drift, 0.805, (0.8, 0.8)), "fifty times as long, and no matter"


def best(cluster: Cluster) -> TrainingChoice:
    return best_training(SPEC, cluster, TrainingFacts(32, 8, 2), steps=5000).choices[0]


def test_another_plan_gains_when_a_rank_is_slow_and_none_when_nothing_changed() -> None:
    cluster = cluster_of(SURVEY, SPEC)
    chosen = best(cluster)
    share, _ = replan_gain(chosen.placed, SURVEY, Slowdown((1.0,) * len(chosen.placed.devices)), best)
    assert share == pytest.approx(0.0, abs=1e-12)
    even = PlacedPlan(SPEC, Plan.parse("dp=2", SPEC.num_layers), TrainingFacts(32, 8, 2), cluster, (0, 1))
    slow = Slowdown((1.0, 5.0))
    share, other = replan_gain(even, SURVEY, slow, best)
    moved = cluster_of(slowed_survey(SURVEY, (0, 1), slow), SPEC)
    assert moved.devices[0] == cluster.devices[0]
    assert moved.devices[1].matrix_rate("float32", 64) == pytest.approx(
        cluster.devices[1].matrix_rate("float32", 64) / 5
    )
    now = PlacedPlan(SPEC, even.plan, even.facts, moved, (0, 1)).predict().seconds
    assert share == pytest.approx(now / other.predicted.seconds - 1) and share > 0.5
    assert other.placed.plan != even.plan


def test_slow_links_are_slow_in_the_survey() -> None:
    survey = msgspec.structs.replace(
        SURVEY, paths=tuple(msgspec.structs.replace(way, brief=2e8) for way in SURVEY.paths)
    )
    moved = slowed_survey(survey, (0, 1), Slowdown((1.0, 1.0), 4.0))
    assert [(way.latency, way.bandwidth, way.brief) for way in moved.paths] == [(4e-4, 2.5e7, 5e7)] * 2
    assert moved.nodes == SURVEY.nodes
