"""Seconds of roles beside the policy, against sums by hand and against what the engine's scheduler really cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.kits import FakeRing, limits, request
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.core.errors import PlanError
from tllm.engine.schedule.scheduler import Scheduler
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.flops import BACKWARD, layer_flops, logits_flops
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import JudgeFacts, TrainingFacts
from tllm.planner.cost.serving_load import SamplingFacts, ServingFacts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.role_seconds import computed_prompts, dealt_seconds, sampling_seconds
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.cut import cut_stage
from tllm.spec.plan import Plan

SPEC = spec_of(4)
RATE = 1e10


def device(speed: float = 1.0) -> Device:
    rates = (("float32", ((1.0, speed * RATE), (256.0, speed * RATE))),)
    return Device(2**33, rates, speed * 3e9, operation_seconds=1e-5 / speed)


def cluster(*speeds: float) -> Cluster:
    names = tuple(f"n{i}" for i in range(len(speeds)))
    devices = tuple(map(device, speeds))
    return Cluster(names, devices, tuple(range(len(speeds))), (None,) * len(speeds), default=LinkSpeed(1e-4, 1e8))


def facts_of(sampling: SamplingFacts, **more: object) -> TrainingFacts:
    return replace(
        TrainingFacts(sampling.context, sampling.groups * sampling.num_generations, 2), sampling=sampling, **more
    )  # type: ignore[arg-type]


def sampled(sampling: SamplingFacts, plan: str = "pp=1", speeds: tuple[float, ...] = (1.0,)) -> float:
    return sampling_seconds(SPEC, Plan.parse(plan, 4), facts_of(sampling), cluster(*speeds), tuple(range(len(speeds))))


def per_token(at_once: int, prompt: int, reply: int) -> float:
    alone = Plan.parse("pp=1", 4)
    return predict_serving(SPEC, alone, cluster(1.0), (0,), ServingFacts("float32", prompt, reply, at_once)).per_token


def test_waves_of_completions_are_decoded_one_after_another() -> None:
    """20 completions of which 8 have room at once: two waves of eight, and one of four."""
    some = SamplingFacts(32, 40, 5, 4, 8, 80)
    long = replace(some, completion=41)
    steps = 2 * per_token(8, 32, 40) * 39 + per_token(4, 32, 40) * 39
    longer = 2 * per_token(8, 32, 41) * 40 + per_token(4, 32, 41) * 40
    assert sampled(long) - sampled(some) == pytest.approx(longer - steps)
    assert sampled(some) > steps, "and the prompts"


def test_a_group_alone_is_sampled_after_another() -> None:
    together, one = SamplingFacts(32, 40, 3, 4, 12, 80), SamplingFacts(32, 40, 1, 4, 12, 80)
    assert sampled(replace(together, one_by_one=True)) == pytest.approx(3 * sampled(one))
    assert sampled(together) < 3 * sampled(one)


def test_replicas_wait_for_the_slowest() -> None:
    some = SamplingFacts(32, 40, 6, 4, 64, 80)
    for plan, speeds, alone in (
        ("dp=2", (1.0, 1.0), 3),
        ("dp=2", (1.0, 4.0), 3),
        ("dp=2:1", (1.0, 1.0), 4),
        ("dp=3", (1.0, 9.0, 9.0), 2),
    ):
        assert sampled(some, plan, speeds) == pytest.approx(sampled(replace(some, groups=alone)))


@pytest.mark.parametrize(("prompt", "generations"), [(40, 6), (33, 3), (32, 4), (5, 8), (17, 1)])
def test_the_prompt_of_a_group_is_computed_as_the_scheduler_computes_it(prompt: int, generations: int) -> None:
    """Once, and of each further completion what follows the last full page before its end."""
    sizes = limits(num_pages=64, max_model_len=80, page_size=PAGE_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
    scheduler = Scheduler(sizes)
    ring = FakeRing(scheduler)
    for number in range(generations):
        scheduler.add(request(f"r{number}", [1 + i % 3 for i in range(prompt)], 1))
    ring.run()
    computed = sum(map(sum, ring.sizes))
    assert prompt * computed_prompts(SamplingFacts(prompt, 1, 1, generations, 8, 80)) == pytest.approx(computed)


def test_roles_are_added_to_the_policys_step() -> None:
    some = SamplingFacts(32, 40, 4, 4, 16, 80)
    plain = TrainingFacts(80, 16, 2)
    placed = PlacedPlan(SPEC, Plan.parse("dp=2", 4), plain, cluster(1.0, 1.0), (0, 1))
    alone = placed.predict()
    assert alone.roles == () and alone.policy == alone.seconds
    step = replace(placed, facts=replace(plain, sampling=some, reference=True)).predict()
    roles = dict(step.roles)
    assert step.policy == pytest.approx(alone.seconds) and set(roles) == {"sampling", "reference"}
    assert roles["sampling"] == pytest.approx(sampled(some, "dp=2", (1.0, 1.0)))
    assert roles["reference"] == pytest.approx(alone.compute / (1 + BACKWARD))
    twice = replace(plain, sampling=some, reference=True, value_pass=True)
    again = replace(placed, facts=twice).predict()
    assert again.policy > step.policy
    assert dict(again.roles) == pytest.approx(roles), "neither samples nor a reference has a gradient"
    assert step.tokens_per_second == pytest.approx(alone.tokens_per_second * alone.seconds / step.seconds)
    halves = replace(placed, facts=replace(plain, sampling=replace(some, share=0.5))).predict()
    assert dict(halves.roles)["sampling"] == pytest.approx(roles["sampling"] / 2)


def test_a_reference_beside_an_adapter_is_a_forward_pass_of_the_model() -> None:
    """Of what is learned it is a larger part, as the model has no gradients of its weights, nor below the adapter."""
    whole = cut_stage(SPEC, (1,))[0]
    cases: tuple[tuple[tuple[int, ...], str], ...] = (
        ((), "none"),
        ((2, 3), "none"),
        ((2, 3), "layer"),
        ((), "selective"),
    )
    for layers, recompute in cases:
        adapter = AdapterFacts(2, ("q_proj",), layers=layers)
        facts = TrainingFacts(80, 16, 2, adapter=adapter, target_tokens=1, reference=True)
        plan = Plan.parse(f"pp=1,recompute={recompute}", 4)
        found = dict(PlacedPlan(SPEC, plan, facts, cluster(1.0), (0,)).predict().roles)["reference"]
        forward = 16 * (4 * layer_flops(SPEC, SPEC.layers[0], whole, (80,)) + logits_flops(SPEC, whole, 1)) / RATE
        assert found == pytest.approx(forward), (layers, recompute)


def test_a_teacher_takes_a_forward_pass_of_every_row() -> None:
    teacher = JudgeFacts(spec_of(6), "float32", 8 * 64, 64)
    whole = cut_stage(teacher.spec, (1,))[0]
    flops = 6 * layer_flops(teacher.spec, teacher.spec.layers[0], whole, (64,)) + logits_flops(teacher.spec, whole, 64)
    found = dealt_seconds(teacher, cluster(1.0), (0,))
    assert found == pytest.approx(8 * flops / RATE, rel=0.03), "and the starts of operations"
    assert dealt_seconds(teacher, cluster(1.0, 2.0), (1,)) < 0.6 * found
    facts = TrainingFacts(64, 8, teacher=replace(teacher, dtype="bfloat16"))
    unknown = PlacedPlan(SPEC, Plan.parse("pp=1", 4), facts, cluster(1.0), (0,)).predict()
    assert unknown.roles == (), "no device says how fast it is in bfloat16"


def test_a_device_that_was_measured_as_it_samples_is_timed_so() -> None:
    some = SamplingFacts(32, 40, 4, 4, 16, 80)
    both = cluster(1.0)
    both = replace(both, devices=(replace(device(7.0), serving=device(1.0)),))
    placed = PlacedPlan(SPEC, Plan.parse("pp=1", 4), facts_of(some), both, (0,))
    assert dict(placed.predict().roles)["sampling"] == pytest.approx(sampled(some))


def test_a_plan_that_cannot_sample_is_refused() -> None:
    for plan in ("cp=2", "pp=2,chunks=2"):
        with pytest.raises(PlanError, match="samples nothing") as refused:
            sampled(SamplingFacts(32, 40, 4, 4, 16, 80), plan, (1.0, 1.0))
        assert refused.value.hint == "leave chunks and cp out"
