"""No plan of any small cluster takes less than the bound, and without messages to send the bound is reached."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.unit.planner.search.test_serving_search import cluster_of, some_of, spec_of
from tests.unit.planner.search.test_training_search import every_plan
from tllm.core.errors import ConfigError, PlanError
from tllm.planner.bounds.training_bound import least_step_seconds
from tllm.planner.cluster.device import Cluster, Device
from tllm.planner.cost.flops import training_flops
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec, MoeSpec

SIZES = (1, 2, 4)


def least_of_every_plan(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> float:
    """Of all plans, whether they fit in memory or not: the bound knows nothing of most of memory."""
    least = float("inf")
    for plan, devices, sized in every_plan(spec, cluster, facts):
        try:
            least = min(least, PlacedPlan(spec, plan, sized, cluster, devices).predict().seconds)
        except PlanError:
            continue
    return least


def with_other_rates(draw: random.Random, cluster: Cluster) -> Cluster:
    """Logits at a rate of their own, and split backward passes that are faster or slower than whole ones."""
    return replace(
        cluster,
        devices=tuple(
            replace(
                device,
                logits_rates=(("float32", ((1.0, draw.choice([5e8, 3e9])), (64.0, draw.choice([2e9, 3e10])))),),
                split_backward_factor=draw.choice([0.9, 1.0, 1.3]),
            )
            for device in cluster.devices
        ),
    )


@pytest.mark.parametrize("seed", some_of(60, 14))
def test_no_plan_takes_less(seed: int) -> None:
    draw = random.Random(2000 + seed)
    moe = MoeSpec(num_experts=4, top_k=2, width=256) if draw.random() < 0.2 else None
    spec = spec_of(draw.randint(1, 3), draw.choice([(None,), (16, None)]), moe)
    cluster = cluster_of(draw, 2)
    if draw.random() < 0.5:
        cluster = with_other_rates(draw, cluster)
    facts = TrainingFacts(draw.choice([8, 64]), draw.randint(1, 3), target_tokens=draw.choice([None, 5]))
    if draw.random() < 0.3:
        facts = replace(facts, adapter=AdapterFacts(rank=2, targets=("q_proj", "v_proj")))
    bound = least_step_seconds(spec, cluster, facts, SIZES)
    assert 0 < bound <= least_of_every_plan(spec, cluster, facts) * (1 + 1e-12)


def test_of_one_device_it_is_what_the_step_takes() -> None:
    spec, device = spec_of(3), Device(2**34, (("float32", ((1.0, 3e9),)),), 1e10)
    cluster, facts = Cluster(("a",), (device,), (0,), (None,)), TrainingFacts(64, 3)
    seconds = training_flops(spec, [64]) * 3 / 3e9
    assert least_step_seconds(spec, cluster, facts, (1,)) == pytest.approx(seconds, rel=1e-12)
    assert least_of_every_plan(spec, cluster, facts) == pytest.approx(seconds, rel=1e-12)


def test_devices_count_by_their_speed_for_what_they_do_best() -> None:
    """One device is good at layers, one at logits: with prices for both the bound is that of the linear program."""
    spec = spec_of(2)
    rates = (1e9, 8e9), (4e9, 1e9)
    devices = tuple(
        Device(2**34, (("float32", ((1.0, layers),)),), 1e10, logits_rates=(("float32", ((1.0, logits),)),))
        for layers, logits in rates
    )
    cluster = Cluster(("a", "b"), devices, (0, 1), (None, None))
    whole = training_flops(spec, [64])
    logits = 3 * 2 * 64 * spec.hidden_size * spec.vocab_size
    layers, step = whole - logits, 1e-5

    def seconds(part: float) -> float:
        """All logits and a part of the layers on a, or a part of the logits if the layers have none there."""
        on_a = layers * max(part, 0.0) / 1e9 + logits * min(1.0, 1 + part) / 8e9
        return max(on_a, layers * min(1.0, 1 - part) / 4e9 + logits * max(-part, 0.0) / 1e9)

    best = min(seconds(-1 + 2 * i * step) for i in range(round(1 / step) + 1))
    assert least_step_seconds(spec, cluster, TrainingFacts(64, 1), (1,)) == pytest.approx(best, rel=1e-3)


def test_a_device_without_room_for_a_process_takes_no_part() -> None:
    device = Device(2**34, (("float32", ((1.0, 3e9),)),), 1e10)
    two = Cluster(("a", "b"), (device, replace(device, memory=2**20)), (0, 1), (None, None))
    one = Cluster(("a",), (device,), (0,), (None,))
    facts = TrainingFacts(64, 2)
    assert least_step_seconds(spec_of(2), two, facts, (1, 2)) == least_step_seconds(spec_of(2), one, facts, (1, 2))
    nobody = replace(one, devices=(two.devices[1],))
    assert least_step_seconds(spec_of(2), nobody, facts, (1,)) == 0


def test_an_unknown_dtype_is_said() -> None:
    cluster = Cluster(("a",), (Device(2**34, (("float32", ((1.0, 3e9),)),), 1e10),), (0,), (None,))
    with pytest.raises(ConfigError, match="no speed in bfloat16"):
        least_step_seconds(spec_of(1), cluster, TrainingFacts(8, 1, dtype="bfloat16"), (1,))
