"""How many ranks a token of a mixture of experts goes to, against every choice that it can have."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.cost.traffic import expected_dispatch_share
from tllm.planner.simulate.training_step import predict_step
from tllm.spec.model_spec import ModelSpec, MoeSpec
from tllm.spec.plan import Plan

FACTS = TrainingFacts(16, 24, 1)


def mixture(experts: int, chosen: int) -> ModelSpec:
    spec = spec_of(2)
    moe = MoeSpec(num_experts=experts, top_k=chosen, width=8)
    return replace(spec, layers=tuple(replace(layer, moe=moe) for layer in spec.layers))


@pytest.mark.parametrize(
    ("text", "experts", "chosen"),
    [("dp=2,ep=2", 8, 2), ("dp=4,ep=4", 8, 3), ("dp=3,ep=3", 8, 2), ("tp=2,dp=2,ep=2", 8, 2), ("dp=6,ep=3", 6, 1)],
)
def test_a_token_meets_as_many_ranks_as_on_an_average_over_all_choices(text: str, experts: int, chosen: int) -> None:
    spec = mixture(experts, chosen)
    plan = Plan.parse(text + ",experts=spread", 2)
    choices = list(combinations(range(experts), chosen))
    for work in rank_works(spec, plan, FACTS):
        own = work.at.replica % plan.ep
        others = [held for place, held in enumerate(work.cut.holders) if place != own]
        reached = sum(any(a <= expert < b for expert in choice) for choice in choices for a, b in others)
        assert expected_dispatch_share(spec, plan, work) == pytest.approx(
            reached / len(choices) / min(chosen, plan.ep - 1), rel=1e-12
        )


def test_what_a_layer_waits_for_is_this_part_of_the_most() -> None:
    plan, link = Plan.parse("dp=4,ep=4,experts=spread", 2), LinkSpeed(0.0, 1e6)
    many, one = (predict_step(mixture(8, k), plan, FACTS, 1e9, link) for k in (3, 1))
    for found, spec in ((many, mixture(8, 3)), (one, mixture(8, 1))):
        work = rank_works(spec, plan, FACTS)[0]
        assert found.layers == pytest.approx(expected_dispatch_share(spec, plan, work) * found.bytes_sent[0].ep / 1e6)
