"""What a server says in mid-run of a better plan, and that it moves to it where it may."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.planner.measured.test_survey import SPEC, serving_node, survey_of
from tllm.api.engine_options import EngineOptions
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.cli.planning.serving_watch import QUIET_LOOKS, ServingWatch
from tllm.core.errors import CapacityError
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.drift import Slowdown
from tllm.planner.search.serving_search import ServingChoice
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.plan import Plan

SURVEY = survey_of("serve", serving_node("box"), serving_node("pi"))
BOTH, ALONE = Plan.parse("pp=2", SPEC.num_layers), Plan.parse("pp=1", SPEC.num_layers)
FACTS = ServingFacts("float32", 64, 16)


class Cluster:
    """What a watch sees of one that serves."""

    def __init__(self) -> None:
        self.is_open, self.advice, self.gain = True, "", 0.0
        self.moves: list[tuple[str, list[str]]] = []
        self.refuses = False
        self.begin(1, BOTH)

    def begin(self, epoch: int, plan: Plan) -> None:
        ranks = [SimpleNamespace(beat=SimpleNamespace(stats={}))] * plan.world_size
        self.state = SimpleNamespace(epoch=epoch, plan=plan, is_ready=True, ranks=ranks)

    def move(self, plan: Plan, nodes: Sequence[str]) -> None:
        if self.refuses:
            raise CapacityError("the ranks on box need 9 B and it has 8 B, 1 B too little")
        self.moves.append((str(plan), list(nodes)))


class ReportedDrift:
    """A drift that has this to say, once."""

    def __init__(self, *news: Slowdown) -> None:
        self.left = list(news)

    def record_totals(self, *given: Any) -> None:
        """Nothing is worked out."""

    def new_slowdown(self) -> Slowdown | None:
        return self.left.pop() if self.left else None


def watching(cluster: Cluster, moves: bool) -> tuple[ServingWatch, ServingChooser]:
    options = EngineOptions(Path("model"), SPEC, BOTH, "float32", 1, 16, None, None, 8)
    chooser = ServingChooser(options, FACTS, None, 2)
    predicted = predict_serving(SPEC, BOTH, cluster_of(SURVEY, SPEC), (0, 1), chooser.facts)
    chooser.survey, chooser.chosen = SURVEY, ServingChoice(BOTH, (0, 1), predicted)
    timed = SimpleNamespace(times=["one"], pooled=["other"])
    return ServingWatch(chooser, cluster, timed, moves), chooser  # type: ignore[arg-type]


def look(watch: ServingWatch, *news: Slowdown) -> None:
    """First at what epoch it is, then with these news."""
    asyncio.run(watch.look())
    watch._drift = ReportedDrift(*news) if watch._drift is not None else None  # type: ignore[assignment]
    asyncio.run(watch.look())


SLOW = Slowdown((1.0, 10.0))


def test_it_says_what_another_plan_would_gain(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    watch, chooser = watching(cluster, moves=False)
    look(watch, SLOW)
    assert "pi takes 10 times as long to compute as in the beginning: plan pp=1,tp=1,layers=4 on box" in cluster.advice
    assert cluster.advice in caplog.text and cluster.gain > 1
    assert not cluster.moves and chooser.survey is SURVEY


def test_it_says_so_once_a_minute() -> None:
    cluster = Cluster()
    watch, _ = watching(cluster, moves=False)
    look(watch, SLOW)
    told = ReportedDrift(Slowdown((20.0, 1.0)))
    watch._drift = told  # type: ignore[assignment]
    for _ in range(QUIET_LOOKS - 1):
        asyncio.run(watch.look())
    assert told.left and "pi takes 10 times" in cluster.advice
    asyncio.run(watch.look())
    assert not told.left and "box takes 20 times" in cluster.advice


def test_little_gain_moves_nothing() -> None:
    cluster = Cluster()
    watch, chooser = watching(cluster, moves=True)
    chooser.chosen = chooser.best(cluster_of(SURVEY, SPEC))
    cluster.begin(1, chooser.chosen.plan)
    look(watch, Slowdown((1.4,) * len(chooser.chosen.devices)))
    assert "no other plan would be much faster" in cluster.advice and cluster.gain == 0 and not cluster.moves


def test_it_moves_and_follows_the_new_plan() -> None:
    cluster = Cluster()
    watch, chooser = watching(cluster, moves=True)
    look(watch, SLOW)
    assert cluster.moves == [(str(ALONE), ["box"])]
    assert chooser.survey is not None and chooser.survey.nodes[1] == SURVEY.nodes[1].slower(10)
    cluster.begin(2, ALONE)
    look(watch)
    assert watch.is_planned and cluster.advice == "" and chooser.chosen is not None and chooser.chosen.plan == ALONE
    assert watch._timed.times == [], "what was measured under the other plan counts no more"


def test_a_plan_that_it_came_back_from_is_not_chosen_again() -> None:
    cluster = Cluster()
    watch, chooser = watching(cluster, moves=True)
    look(watch, SLOW)
    cluster.begin(3, BOTH)
    look(watch)
    assert watch.is_planned and chooser.refused == {str(ALONE)}
    assert chooser.chosen is not None and chooser.chosen.plan == BOTH
    assert chooser.survey is not None
    assert str(chooser.best(cluster_of(chooser.survey, SPEC)).plan) != str(ALONE)


def test_nodes_without_the_memory_are_not_asked_again() -> None:
    cluster = Cluster()
    cluster.refuses = True
    watch, chooser = watching(cluster, moves=True)
    look(watch, SLOW)
    assert chooser.refused == {str(ALONE)} and chooser.survey is SURVEY


def test_without_some_nodes_nothing_is_said() -> None:
    cluster = Cluster()
    watch, _ = watching(cluster, moves=True)
    cluster.begin(2, ALONE)
    look(watch, SLOW)
    assert not watch.is_planned and not cluster.advice
    cluster.is_open = False
    cluster.begin(3, BOTH)
    look(watch, SLOW)
    assert not watch.is_planned, "before it serves"
