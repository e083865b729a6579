"""The memory of every rank by one replica of each kind, against each rank's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.cost.test_expert_dispatch import mixture
from tests.unit.planner.simulate.test_large_cluster import EXPERTS
from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.planner.cost.buckets import buckets_of
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.memory.training_memory import rank_totals, training_bytes
from tllm.spec.model_spec import ModelSpec, MoeSpec
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


@pytest.mark.parametrize(
    ("text", "of_ordinary", "of_experts"),
    [("dp=2,ep=2", 1, 1), ("dp=2,ep=2,zero=1", 2, 1), ("dp=4,ep=2,zero=1", 4, 2), ("dp=2,zero=1", 2, 2)],
)
def test_of_states_on_a_disk_those_of_the_longest_bucket_are_in_memory(
    text: str, of_ordinary: int, of_experts: int
) -> None:
    """Of experts that replicas divide too, and with ZeRO a rank's own range of it."""
    spec, facts = replace(EXPERTS, layers=(replace(EXPERTS.layers[0], moe=MoeSpec(6, 2, 4096)),) * 8), FACTS[1]
    plan, on_disk = (Plan.parse(text + more, spec.num_layers) for more in ("", ",offload=disk"))
    here, there = (training_bytes(spec, one, facts)[0] for one in (plan, on_disk))
    work = rank_works(spec, plan, facts)[0]
    buckets = [buckets_of(spec, plan, facts, work, spread) for spread in (False, True)]
    longest = max(max(some, default=0) // ranks for some, ranks in zip(buckets, (of_ordinary, of_experts), strict=True))
    assert there.buffers - here.buffers == 2 * longest


def test_a_stage_that_learns_nothing_has_no_states_on_its_disk() -> None:
    """It was told as a fault of the planner: an adapter of late layers in a pipeline."""
    adapter = AdapterFacts(2, ("q_proj",), layers=(7,))
    first, last = training_bytes(SPEC, Plan.parse("pp=2,offload=disk", 8), TrainingFacts(64, 8, adapter=adapter))
    assert first.on_disk == first.buffers == 0 < last.on_disk == last.buffers


def test_what_rank_0_reads_is_its_own() -> None:
    totals = rank_totals(SPEC, Plan.parse("dp=3", SPEC.num_layers), TrainingFacts(64, 24))
    assert totals[0] > totals[1] == totals[2]
