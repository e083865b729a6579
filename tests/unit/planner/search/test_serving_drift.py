"""Speeds of a server while it serves, out of sums that ranks tell, and what another plan would gain by them."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.unit.planner.measured.test_survey import SPEC, serving_node, survey_of
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts
from tllm.planner.cost.tensor_parallel.grid_team import stage_teams
from tllm.planner.measured.outcome import WARM
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.drift import BEGINNING, LATELY, Slowdown
from tllm.planner.search.serving_drift import (
    LEAST,
    DecodeTotals,
    LoneStepTotals,
    ServingDriftDetector,
    decode_totals,
    lone_step_totals,
    serving_gain,
)
from tllm.planner.search.serving_search import ServingChoice, best_serving
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.plan import Plan

SURVEY = survey_of("serve", serving_node("box"), serving_node("pi"))
CLUSTER = cluster_of(SURVEY, SPEC)
FACTS = ServingFacts("float32", 64, 16)
PLAN = Plan.parse("pp=2", SPEC.num_layers)
CHOICE = ServingChoice(PLAN, (0, 1), predict_serving(SPEC, PLAN, CLUSTER, (0, 1), FACTS))
TEAMS = stage_teams(SPEC, PLAN, CLUSTER, (0, 1), FACTS)
HOP = 1e-3


class Server:
    """Two stages that take `bias` times what is predicted, each slower by its own factor."""

    def __init__(self, bias: float = 1.3) -> None:
        self.drift = ServingDriftDetector(SPEC, CHOICE, CLUSTER, FACTS)
        self.bias, self.replies, self.turns = bias, [DecodeTotals(0, 0, 0, 0, 0)] * 2, LoneStepTotals(0, 0)
        self.drift.record_totals(self.replies, self.turns)

    def serve(
        self,
        looks: int,
        slower: tuple[float, float] = (1, 1),
        hop: float = HOP,
        sequences: int = 1,
        keys: int = 80,
        drafted: int = 0,
    ) -> None:
        rows, count = sequences * (1 + drafted), 2 * LEAST
        batch = ExpectedBatch(rows, sequences, keys, rows)
        taken = [
            self.bias * slow * team.batch_time(PLAN.runs[i], batch).seconds
            for i, (team, slow) in enumerate(zip(TEAMS, slower, strict=True))
        ]
        done = [
            DecodeTotals(count, count * sequences, count * rows, count * sequences * keys, count * each)
            for each in taken
        ]
        for _ in range(looks):
            self.replies = [
                DecodeTotals(*map(sum, zip(*both, strict=True))) for both in zip(self.replies, done, strict=False)
            ]
            if sequences == 1:
                self.turns = LoneStepTotals(
                    self.turns.turns + count, self.turns.seconds + count * (sum(taken) + 2 * hop)
                )
            self.drift.record_totals(self.replies, self.turns)


def test_a_rank_that_becomes_slow_is_told_once() -> None:
    server = Server()
    server.serve(WARM + BEGINNING + LATELY)
    assert server.drift.new_slowdown() is None, "a prediction that is off all along is no news"
    server.serve(LATELY, (1, 2.5))
    news = server.drift.new_slowdown()
    assert news is not None and news.rank_factors == pytest.approx((1, 2.5)) and news.link_factor == pytest.approx(1)
    server.serve(LATELY, (1, 2.5))
    assert server.drift.new_slowdown() is None


def test_larger_batches_and_longer_sequences_are_not_a_slower_machine() -> None:
    server = Server()
    server.serve(WARM + BEGINNING + LATELY)
    server.serve(2 * LATELY, sequences=8, keys=2000)
    assert server.drift.new_slowdown() is None


def test_drafted_tokens_are_not_a_slower_machine() -> None:
    server = Server()
    server.serve(WARM + BEGINNING + LATELY)
    server.serve(2 * LATELY, drafted=7)
    assert server.drift.new_slowdown() is None


def test_links_that_become_slow_are_told_from_turns_of_one_batch_alone() -> None:
    server = Server()
    server.serve(WARM + BEGINNING + LATELY)
    server.serve(LATELY, hop=3 * HOP)
    news = server.drift.new_slowdown()
    assert news is not None and news.rank_factors == pytest.approx((1, 1)) and news.link_factor == pytest.approx(3)
    assert server.drift.new_slowdown() is None
    server.serve(LATELY, hop=3 * HOP, sequences=4)
    assert server.drift.new_slowdown() is None, "with more batches in the ring nothing is learned of links"


def test_a_look_waits_until_each_rank_has_done_enough() -> None:
    server = Server()
    for done in accumulate([1] * (LEAST - 1)):
        server.drift.record_totals([DecodeTotals(*[done] * 5)] * 2, LoneStepTotals(0, 0))
        assert server.drift._last == ([DecodeTotals(0, 0, 0, 0, 0)] * 2, LoneStepTotals(0, 0))
    server.drift.record_totals([DecodeTotals(*[LEAST] * 5)] * 2, LoneStepTotals(0, 0))
    assert server.drift._last == ([DecodeTotals(*[LEAST] * 5)] * 2, LoneStepTotals(0, 0))


def test_the_best_plan_leaves_a_slow_machine_out() -> None:
    def best(cluster: object) -> ServingChoice:
        return best_serving(SPEC, cluster, FACTS).choices[0]  # type: ignore[arg-type]

    share, other = serving_gain(SPEC, CHOICE, SURVEY, Slowdown((1.0, 10.0)), FACTS, best)
    assert other.devices == (0,) and str(other.plan) == "pp=1,tp=1,layers=4"
    slow = cluster_of(SURVEY, SPEC)
    alone = predict_serving(SPEC, other.plan, slow, (0,), FACTS).seconds
    assert other.predicted.seconds == pytest.approx(alone)
    assert share > 2, "half of the layers took ten times as long"


def test_what_heartbeats_hold() -> None:
    stats = {
        "reply_batches": 3.0,
        "reply_sequences": 4.0,
        "reply_rows": 9.0,
        "reply_keys": 50.0,
        "reply_seconds": 0.5,
        "turns": 2,
        "turn_seconds": 1,
    }
    assert decode_totals(stats) == DecodeTotals(3, 4, 9, 50, 0.5) and lone_step_totals(stats) == LoneStepTotals(2, 1)
    assert decode_totals({}) == DecodeTotals(0, 0, 0, 0, 0) and lone_step_totals({}) == LoneStepTotals(0, 0)
