"""The memory of every rank by one replica of each kind, against each rank's own."""

from __future__ import annotations

import pytest

from tests.unit.planner.cost.test_expert_dispatch import mixture
from tests.unit.planner.simulate.test_large_cluster import EXPERTS
from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.memory.training_memory import rank_totals, training_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

FACTS = (
    TrainingFacts(64, 23),
    TrainingFacts(64, 24, mirror_steps=2),
    TrainingFacts(64, 32, deterministic=True),
    TrainingFacts(64, 24, local_steps=2),
)


@pytest.mark.parametrize("spec", [SPEC, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "plan",
    ["pp=2", "pp=2,tp=2,dp=5", "pp=2,dp=1:2:2:1,zero=2", "dp=3,zero=1,cp=2", "tp=2,dp=7,zero=3", "dp=4,servers=2"],
)
@pytest.mark.parametrize("facts", FACTS)
def test_each_rank_has_the_total_of_its_kind(spec: ModelSpec, plan: str, facts: TrainingFacts) -> None:
    made = Plan.parse(plan, spec.num_layers)
    assert list(rank_totals(spec, made, facts)) == [rank.total for rank in training_bytes(spec, made, facts)]


def test_replicas_with_more_experts_have_a_total_of_their_own() -> None:
    """Four experts over three replicas: the last has two of them."""
    spec, facts = mixture(4, 2), TrainingFacts(64, 24)
    plan = Plan.parse("dp=3,ep=3", spec.num_layers)
    totals = rank_totals(spec, plan, facts)
    assert totals[2] > totals[1]
    assert list(totals) == [rank.total for rank in training_bytes(spec, plan, facts)]


def test_what_rank_0_reads_is_its_own() -> None:
    totals = rank_totals(SPEC, Plan.parse("dp=3", SPEC.num_layers), TrainingFacts(64, 24))
    assert totals[0] > totals[1] == totals[2]
