"""Seconds of a rank's passes against the same written out product by product, and what never makes it slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.planner.cluster.device import Device
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.activations import layer_bytes, logits_bytes
from tllm.planner.cost.flops import layer_flops
from tllm.planner.cost.rank_work import RankWork, TrainingFacts, rank_works
from tllm.planner.cost.roofline.layer_time import ConstantRate, LayerTimeModel, PassSeconds
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec
from tllm.spec.plan import Plan

FACTS = TrainingFacts(64, 8, 2, "bfloat16")
FLAT = Device(2**30, (("bfloat16", ((1, 1e12),)), ("float8", ((1, 2e12),))), 1e30)
LAYERS, BARE = range(4), Execution(touches=0)


def pass_seconds(
    device: Device = FLAT,
    execution: Execution = BARE,
    products: str | None = None,
    text: str = "pp=1",
    spec: ModelSpec = SPEC,
    run: range = LAYERS,
) -> PassSeconds:
    plan = Plan.parse(text, spec.num_layers)
    return LayerTimeModel(spec, plan, FACTS, _work(spec, plan), device, execution, products).pass_seconds(run)


def _work(spec: ModelSpec, plan: Plan) -> RankWork:
    return rank_works(spec, plan, FACTS)[0]


@pytest.mark.parametrize("text", ["pp=1", "tp=2", "cp=2", "pp=1,recompute=layer", "pp=1,recompute=selective"])
@pytest.mark.parametrize("run", [LAYERS, range(4, 8)])
def test_with_one_rate_and_free_memory_it_is_flops_over_speed(text: str, run: range) -> None:
    """But for attention's backward pass, which has five products for two."""
    plan = Plan.parse(text, SPEC.num_layers)
    even = ConstantRate(SPEC, plan, FACTS, _work(SPEC, plan), 1e12).pass_seconds(run)
    found = pass_seconds(text=text, run=run)
    assert found.forward == pytest.approx(even.forward, rel=1e-12)
    assert found.attention == pytest.approx(even.attention, rel=1e-12)
    assert found.backward_weight == pytest.approx(even.backward_weight, rel=1e-12)
    assert found.backward_input == pytest.approx(even.backward_input + even.attention / 2, rel=1e-12)
    assert found.recompute == pytest.approx(even.recompute, rel=1e-12)


def test_every_product_at_the_rate_of_its_least_size() -> None:
    """64 x 128 tokens; qkv 64 x 128, out 64 x 64, gate and up 64 x 320, down 160 x 64; scores of heads 8 wide."""
    curve = ((8, 1e9), (64, 3e9), (128, 7e9))
    device = replace(FLAT, flop_rates=(("bfloat16", curve),))
    flops = 2 * 128 * (64 * 128 + 64 * 64 + 64 * 320 + 160 * 64)
    scores = 2 * 4 * 8 * 8 * (64 * 65 // 2)
    assert pass_seconds(device, run=range(1)).forward == pytest.approx(flops / 3e9 + scores / 1e9, rel=1e-12)
    end = pass_seconds(device, run=range(7, 8)).forward - pass_seconds(device, run=range(6, 7)).forward
    assert end == pytest.approx(2 * 128 * 64 * 512 / 3e9, rel=1e-12)


def test_a_product_is_never_faster_than_its_bytes() -> None:
    slow = replace(FLAT, memory_bandwidth=1e3)
    moved = 2 * (128 * (64 + 128) + 64 * 128 + 128 * 128 + 64 * 64 + 128 * 384 + 64 * 320 + 128 * 224 + 160 * 64)
    found = pass_seconds(slow, run=range(1))
    assert found.forward == pytest.approx(moved / 1e3 + found.attention, rel=1e-9)


def test_elementwise_work_moves_what_a_layer_keeps() -> None:
    plan = Plan.parse("pp=1", SPEC.num_layers)
    work, slow = _work(SPEC, plan), replace(FLAT, memory_bandwidth=1e6)
    bare, found = pass_seconds(slow), pass_seconds(slow, Execution(touches=5))
    by_steps = replace(work.batch, is_lean=False)
    kept = 4 * layer_bytes(SPEC, SPEC.layers[0], work.cut, by_steps)
    assert found.whole - bare.whole == pytest.approx(5 * kept / 1e6, rel=1e-9)
    assert found.forward - bare.forward == pytest.approx(2 * kept / 1e6, rel=1e-9)
    assert found.memory == pytest.approx(5 * kept / 1e6, rel=1e-9) and bare.memory == 0
    ends = [pass_seconds(slow, Execution(touches=touches), run=range(7, 8)).memory for touches in (0, 5)]
    of_logits = logits_bytes(SPEC, work.cut, by_steps)
    assert ends[1] - ends[0] == pytest.approx(5 * (kept / 4 + of_logits) / 1e6, rel=1e-9)


def test_linear_layers_in_eight_bits_and_what_casting_takes() -> None:
    """Attention and logits stay; 5 bytes for each element that goes into a product, or comes back into its gradient."""
    wide, narrow = pass_seconds(), pass_seconds(products="float8")
    linear = wide.forward - wide.attention
    assert narrow.forward == pytest.approx(linear / 2 + wide.attention, rel=1e-9)
    slow = replace(FLAT, memory_bandwidth=1e9)
    into = 4 * 128 * (64 + 64 + 64 + 160)
    back = 4 * 128 * (128 + 64 + 320 + 64)
    moved = pass_seconds(slow, products="float8").memory
    assert moved == pytest.approx(5 * (into + back) / 1e9, rel=1e-9)
    whole = wide.forward - pass_seconds(run=range(8)).forward
    narrow_whole = narrow.forward - pass_seconds(run=range(8), products="float8").forward
    assert whole - narrow_whole == pytest.approx(-linear / 2)


def test_a_trainer_that_works_a_share_out_again() -> None:
    some = pass_seconds(execution=Execution(touches=0, recompute_share=0.25))
    assert some.recompute == pytest.approx(some.forward / 4)
    assert pass_seconds(execution=Execution(touches=0, recompute_share=0), text="pp=1,recompute=layer").recompute == 0


def test_a_slower_kernel_of_attention() -> None:
    fast, slow = pass_seconds(), pass_seconds(execution=Execution(touches=0, attention=0.5))
    assert slow.attention == pytest.approx(2 * fast.attention)
    assert slow.whole - fast.whole == pytest.approx(3.5 * fast.attention)


EXPERTS = replace(SPEC, layers=(LayerSpec(SPEC.layers[0].rope, moe=MoeSpec(16, 4, 96, shared_width=32)),) * 8)


@pytest.mark.parametrize("text", ["dp=1", "tp=2", "dp=2,ep=2,experts=spread", "dp=4,ep=4,experts=spread"])
def test_experts_are_as_many_flops_however_they_are_spread(text: str) -> None:
    work = _work(EXPERTS, Plan.parse(text, 8))
    gate = 2 * 128 * 64  # of the shared expert: one column
    whole = layer_flops(EXPERTS, EXPERTS.layers[0], work.cut, FACTS.lengths) - gate
    assert pass_seconds(spec=EXPERTS, text=text, run=range(1)).forward == pytest.approx(whole / 1e12, rel=1e-9)


def test_tokens_of_several_replicas_make_larger_products_of_experts() -> None:
    """128 tokens on 4 of 16 experts are 32 rows for each; of two replicas 64, for half as many experts."""
    steep = replace(FLAT, flop_rates=(("bfloat16", ((32, 1e9), (33, 1e12))),))
    alone, both = (pass_seconds(steep, spec=EXPERTS, text=text, run=range(1)).forward for text in ("dp=1", "dp=2,ep=2"))
    of_experts = 128 * 4 * 6 * 64 * 96
    assert alone - both == pytest.approx(of_experts / 1e9 - of_experts / 1e12, rel=1e-9)


@given(
    st.floats(1e9, 1e15),
    st.floats(1e6, 1e12),
    st.floats(1, 3),
    st.sampled_from(["pp=1", "tp=2", "pp=1,recompute=layer"]),
)
def test_faster_never_takes_longer(rate: float, read: float, more: float, text: str) -> None:
    execution = Execution()
    device = replace(FLAT, flop_rates=(("bfloat16", ((1, rate),)),), memory_bandwidth=read)
    base = pass_seconds(device, execution, text=text).whole
    assert pass_seconds(replace(device, memory_bandwidth=more * read), execution, text=text).whole <= base * (1 + 1e-12)
    quick = replace(device, flop_rates=(("bfloat16", ((1, more * rate),)),))
    assert pass_seconds(quick, execution, text=text).whole <= base * (1 + 1e-12)
