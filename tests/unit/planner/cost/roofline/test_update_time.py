"""Traffic of gradients and weights: bytes written out, and where a step pays for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.cost.roofline.test_layer_time import BARE, FLAT, pass_seconds
from tests.unit.planner.simulate.test_large_cluster import EXPERTS
from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.planner.cluster.device import Cluster, LinkSpeed
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.buckets import padded_elements
from tllm.planner.cost.rank_work import TrainingFacts, rank_works
from tllm.planner.cost.roofline.update_time import accumulation_seconds, update_seconds
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

SLOW = replace(FLAT, memory_bandwidth=1e9)


def test_bytes_of_an_element() -> None:
    """Gradient 4, weight and two states 8 each, 3 passes of 4, and 2 where the weight has 16 bits."""
    assert update_seconds(TrainingFacts(64, 8), SLOW, Execution()) == pytest.approx((4 + 3 * 8 + 3 * 4) / 1e9)
    half = TrainingFacts(64, 8, dtype="bfloat16")
    assert update_seconds(half, SLOW, Execution(gradient_passes=7)) == pytest.approx((4 + 3 * 8 + 7 * 4 + 2) / 1e9)
    assert accumulation_seconds(100, 4, half, SLOW) == pytest.approx(100 * (2 + 8) * 3 / 4 / 1e9)
    assert accumulation_seconds(100, 1, half, SLOW) == 0, "one microbatch has nothing to add to"


@pytest.mark.parametrize("run", [range(2), range(6, 8)])
def test_gradients_are_added_by_products_or_by_themselves(run: range) -> None:
    fused, found = (pass_seconds(SLOW, replace(BARE, fused_accumulation=yes), run=run) for yes in (True, False))
    elements = len(run) * (64 * 128 + 64 * 64 + 64 * 320 + 160 * 64) + (64 * 512 if run.stop == 8 else 0)
    added = elements * (2 + 8) * 3 / 4 / 1e9
    assert found.backward_weight - fused.backward_weight == pytest.approx(added)
    assert found.memory - fused.memory == pytest.approx(added)
    assert found.forward == fused.forward and found.backward_input == fused.backward_input


@pytest.mark.parametrize(("text", "ranks"), [("dp=2", 1), ("dp=2,zero=1", 2)])
def test_a_step_ends_with_the_update_of_what_a_rank_holds(text: str, ranks: int) -> None:
    """By its bytes where it was not measured, and only by the roofline model."""
    facts, plan = TrainingFacts(64, 8, 2, "bfloat16"), Plan.parse(text, SPEC.num_layers)
    held = sum(padded_elements(one) for unit in rank_works(SPEC, plan, facts)[0].parameters(SPEC) for one in unit)

    def seconds(execution: Execution | None, measured: float = 0.0) -> float:
        device = replace(SLOW, update_seconds=measured)
        cluster = Cluster(("a", "b"), (device,) * 2, (0, 1), (None, None), LinkSpeed(0, 1e9))
        return PlacedPlan(SPEC, plan, facts, cluster, (0, 1), None, execution).predict().seconds

    more = 5 * 4 * held / ranks / 1e9
    assert seconds(Execution(gradient_passes=8)) - seconds(Execution()) == pytest.approx(more)
    assert seconds(Execution(gradient_passes=8), 1e-9) == seconds(Execution(), 1e-9), "measured"
    assert seconds(None, 1e-9) - seconds(None) == pytest.approx(1e-9 * held / ranks)


@pytest.mark.parametrize(("text", "of_experts"), [("dp=2,ep=2,zero=1", 1), ("dp=4,ep=2,zero=2", 2), ("dp=2,ep=2", 1)])
def test_ranks_update_experts_by_how_many_have_the_same(text: str, of_experts: int) -> None:
    """All of them where ep is all replicas, which ZeRO does not divide; a half was counted."""
    facts, plan = TrainingFacts(64, 8, 2, "bfloat16"), Plan.parse(text, EXPERTS.num_layers)
    held = [one for unit in rank_works(EXPERTS, plan, facts)[0].parameters(EXPERTS) for one in unit]
    experts = sum(padded_elements(one) for one in held if one.spread)
    ordinary = sum(padded_elements(one) for one in held if not one.spread)
    updated = ordinary / (plan.replicas if plan.zero else 1) + experts / of_experts
    assert measured_update(EXPERTS, plan, facts) == pytest.approx(1e-9 * updated)


def test_parameter_servers_update_a_part_each() -> None:
    facts = TrainingFacts(64, 8, 2, "bfloat16")
    for servers in (1, 3):
        plan = Plan.parse(f"dp=2,servers={servers}", SPEC.num_layers)
        held = sum(padded_elements(one) for unit in rank_works(SPEC, plan, facts)[0].parameters(SPEC) for one in unit)
        assert measured_update(SPEC, plan, facts) == pytest.approx(1e-9 * held / servers)


def measured_update(spec: ModelSpec, plan: Plan, facts: TrainingFacts) -> float:
    """Seconds of a step more where each device takes a nanosecond to update an element."""
    count = plan.world_size
    names, each = tuple(map(str, range(count))), (None,) * count

    def seconds(measured: float) -> float:
        devices = (replace(SLOW, update_seconds=measured),) * count
        cluster = Cluster(names, devices, tuple(range(count)), each, LinkSpeed(0, 1e9))
        return PlacedPlan(spec, plan, facts, cluster, tuple(range(count))).predict().seconds

    return seconds(1e-9) - seconds(0.0)
