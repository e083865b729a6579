"""Drafted tokens in the planner: a turn's rows, what it gives, and how many are best, against slower ways to say it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.unit.planner.search.test_serving_search import cluster_of, spec_of
from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.draft_bytes import draft_bytes
from tllm.planner.cost.serving_load import ServingFacts, ServingLoad, loads
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.plan import Plan

FACTS = ServingFacts("float32", 64, 33, num_speculative_tokens=6, acceptance=0.7)
SPEC = spec_of(4)


def far(latency: float, rate: float = 1e12) -> Cluster:
    """Two machines, whose products take as long as their rows, apart."""
    device = Device(1 << 40, (("float32", ((1.0, rate),)),), 1e10)
    return Cluster(("a", "b"), (device,) * 2, (0, 1), (None,) * 2, default=LinkSpeed(latency, 1e9))


def test_a_turn_gives_what_a_thousand_drafts_do() -> None:
    draw = random.Random(1)
    for drafted in (0, 1, 4):
        given = []
        for _ in range(20_000):
            right = 0
            while right < drafted and draw.random() < FACTS.acceptance:
                right += 1
            given.append(1 + right)
        assert ServingLoad(2, FACTS, drafted).tokens_per_step == pytest.approx(sum(given) / len(given), rel=0.02)


def test_rows_of_a_turn() -> None:
    batch = ServingLoad(2, replace(FACTS, concurrency=6), 3).decode
    assert (batch.tokens, batch.rows, batch.sequences) == (12, 12, 3)
    assert ServingLoad(2, FACTS, 3).rows_per_token == pytest.approx(4 / (1 + 0.7 + 0.49 + 0.343))
    assert [one.draft_tokens for one in loads(3, FACTS)] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("cluster", [far(0.02), far(0.0, 1e8)], ids=["far", "slow"])
def test_the_best_number_is_taken(cluster: Cluster, acceptance: float) -> None:
    plan, facts = Plan.parse("pp=2", 4), replace(FACTS, acceptance=acceptance)
    best = predict_serving(SPEC, plan, cluster, (0, 1), facts)
    seconds = []
    for drafted in range(7):
        one = predict_serving(SPEC, plan, cluster, (0, 1), replace(facts, num_speculative_tokens=drafted))
        seconds.append(one.seconds)
        assert one.per_token * one.load.tokens_per_step == pytest.approx(one.step_seconds)
        assert one.load.draft_tokens <= drafted
    assert best.seconds == min(seconds)
    assert seconds == sorted(seconds, reverse=True), "what may be drafted need not be"
    if acceptance == 0.0:
        assert best.load.draft_tokens == 0
    if acceptance == 1.0 and cluster.link(0, 1).latency:
        assert best.load.draft_tokens == 6 and seconds[0] > 5 * seconds[6], "most of a turn is the way"


@pytest.mark.parametrize("seed", range(8))
def test_more_that_is_right_never_serves_slower(seed: int) -> None:
    draw = random.Random(seed)
    cluster, plan = cluster_of(draw, 2), Plan.parse(draw.choice(["pp=2", "tp=2"]), 4)
    facts = replace(FACTS, concurrency=draw.choice([1, 3]))
    seconds = [
        predict_serving(SPEC, plan, cluster, (0, 1), replace(facts, acceptance=part)).seconds
        for part in (0.0, 0.2, 0.5, 0.8, 1.0)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match=r"acceptance is 1\.5"):
        replace(FACTS, acceptance=1.5)
    with pytest.raises(PlanError, match="num_speculative_tokens is 5000, and a batch has 1024"):
        replace(FACTS, num_speculative_tokens=5000)


@pytest.mark.parametrize(("plan", "concurrency"), [("pp=2", 1), ("pp=2", 4), ("tp=2", 3)])
def test_a_draft_model_takes_its_steps_on_the_first_rank(plan: str, concurrency: int) -> None:
    """The turn is that of drafts without a price, and so many steps of the draft model served alone, for each token."""
    cluster, cut, drafts = far(0.02, rate=1e9), Plan.parse(plan, 4), spec_of(1)
    looked_up = replace(FACTS, acceptance=0.9, concurrency=concurrency)
    free = predict_serving(SPEC, cut, cluster, range(cut.world_size), looked_up)
    made = predict_serving(SPEC, cut, cluster, range(cut.world_size), replace(looked_up, draft_model=drafts))
    count, first = made.load.draft_tokens, made.stages[0]
    assert 0 < count <= free.load.draft_tokens and made.seconds > free.seconds
    same = predict_serving(SPEC, cut, cluster, range(cut.world_size), replace(looked_up, num_speculative_tokens=count))
    assert same.load.draft_tokens == count
    alone = ServingFacts("float32", 64, 33, concurrency=-(-concurrency // made.load.batches))
    step = predict_serving(drafts, Plan.parse("pp=1", 1), cluster, (0,), alone).stages[0].decode.seconds
    assert first.decode.seconds - same.stages[0].decode.seconds == pytest.approx(count * step)
    assert [one.decode for one in made.stages[1:]] == [one.decode for one in same.stages[1:]]
    more = [ours.total - theirs.total for ours, theirs in zip(made.memory, free.memory, strict=True)]
    held = draft_bytes(drafts, "float32", looked_up.cached_tokens // PAGE_SIZE, PAGE_SIZE)
    assert more == [held.total, *[0] * (cut.world_size - 1)] and held.weights > 0 < held.cache


def test_a_draft_model_as_slow_as_the_target_does_not_pay_in_one_process() -> None:
    alone = Plan.parse("pp=1", 4)
    facts = replace(FACTS, acceptance=0.9, draft_model=SPEC)
    assert predict_serving(SPEC, alone, far(0.02, rate=1e9), (0,), facts).load.draft_tokens == 0
    assert predict_serving(SPEC, Plan.parse("pp=2", 4), far(0.02, rate=1e9), (0, 1), facts).load.draft_tokens > 0
