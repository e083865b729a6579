"""Predicted steps against sums written out: alone, over a pipeline, over replicas, over slow links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import SHORT_MESSAGE_BYTES, LinkSpeed, worst
from tllm.planner.cluster.execution import TLLM, Execution
from tllm.planner.cost.flops import attention_flops, forward_flops, training_flops
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.traffic import step_traffic
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork
from tllm.planner.simulate.training_step import Links, StepPrediction, predict_step
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from tllm.spec.pipeline_schedule import build
from tllm.spec.plan import Plan

SPEC = ModelSpec(
    family="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    layers=(LayerSpec(RopeSpec(10000.0, 8)),) * 8,
    norm_eps=1e-5,
    activation="silu",
    max_model_len=256,
    attention_scale=8**-0.5,
)
FACTS = TrainingFacts(seq_len=64, global_batch_size=12)
SPEED = 1e9
FREE = LinkSpeed()


def predict(
    text: str, links: Links = FREE, speed: float | list[float] = SPEED, execution: Execution = TLLM
) -> StepPrediction:
    return predict_step(SPEC, Plan.parse(text, SPEC.num_layers), FACTS, speed, links, execution=execution)


WHOLE = 12 * training_flops(SPEC, [64]) / SPEED


def test_one_rank_takes_its_work() -> None:
    alone = predict("pp=1")
    assert (alone.seconds, alone.compute) == pytest.approx((WHOLE, WHOLE), rel=1e-12)
    assert (alone.layers, alone.pipeline, alone.gradients, alone.bubble) == pytest.approx((0, 0, 0, 0), abs=1e-12)
    assert alone.tokens_per_second == pytest.approx(12 * 64 / WHOLE)


@pytest.mark.parametrize("layers", [(), (5, 6)])
def test_beside_an_adapter_attention_has_all_of_its_gradients(layers: tuple[int, ...]) -> None:
    """Those of weights alone are spared: half of attention's backward pass was left out with them."""
    facts = replace(FACTS, adapter=AdapterFacts(2, ("q_proj",), layers=layers))
    got = predict_step(SPEC, Plan.parse("pp=1", SPEC.num_layers), facts, SPEED, FREE)
    below = layers[0] if layers else 0
    flops = training_flops(SPEC, [64], is_frozen=True, forward_only=below)
    assert got.compute == pytest.approx(12 * flops / SPEED, rel=1e-12)


def test_layers_that_run_again_take_a_third_more() -> None:
    of_layers = forward_flops(SPEC, [64], 0)
    assert predict("pp=1,recompute=layer").seconds == pytest.approx(WHOLE + 12 * of_layers / SPEED)
    assert WHOLE < predict("pp=1,recompute=selective").seconds < predict("pp=1,recompute=layer").seconds


@pytest.mark.parametrize("recompute", ["none", "selective", "layer"])
@pytest.mark.parametrize("text", ["pp=1", "dp=2", "pp=2"])
def test_the_second_forward_pass_of_a_deterministic_run_is_one_of_layers_and_logits(text: str, recompute: str) -> None:
    plan, forward = f"{text},recompute={recompute}", forward_flops(SPEC, [64]) / SPEED
    twice = replace(FACTS, value_pass=True)
    once, both = (predict_step(SPEC, Plan.parse(plan, SPEC.num_layers), facts, SPEED, FREE) for facts in (FACTS, twice))
    ranks = Plan.parse(plan, SPEC.num_layers).world_size
    if text == "pp=2":  # the last stage has the logits too, and a bubble of its own
        assert both.compute - once.compute == pytest.approx(12 * (forward + logits_forward()) / 2)
        assert both.seconds - once.seconds > both.compute - once.compute
    else:
        assert both.seconds - once.seconds == pytest.approx(12 * forward / ranks)


def logits_forward() -> float:
    return (forward_flops(SPEC, [64]) - forward_flops(SPEC, [64], 0)) / SPEED


@pytest.mark.parametrize("text", ["dp=3", "tp=2", "cp=2", "dp=2,tp=2,zero=3"])
def test_ranks_share_the_work_where_links_are_free(text: str) -> None:
    """Each cp rank does its part of attention on an average."""
    plan = Plan.parse(text, SPEC.num_layers)
    assert predict(text).seconds == pytest.approx(WHOLE / plan.world_size, rel=1e-9)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zero_bubble"])
def test_a_pipeline_is_the_schedule_that_is_played(order: str) -> None:
    """Attention has no weights: its gradients belong to the half of a backward pass that makes those of inputs."""
    link, hop = LinkSpeed(latency=1e-3, bandwidth=1e7), 64 * 64 * 4
    half = forward_flops(SPEC, [64], 0) / 2 / SPEED
    logits = (forward_flops(SPEC, [64]) - forward_flops(SPEC, [64], 0)) / SPEED
    (whole,) = cut_stage(SPEC, (1,))
    core = SPEC.num_layers / 2 * attention_flops(SPEC, SPEC.layers[0], whole, [64]) / SPEED
    end = half + logits
    works = [[StageWork(half, half + core, half - core)], [StageWork(end, end + core, end - core)]]
    played = SchedulePlayer(build(order, 2, 12)).play(works, link, hop)
    got = predict(f"pp=2,schedule={order}", link)
    assert got.seconds == pytest.approx(played.total) and got.bubble == pytest.approx(played.bubble)
    assert got.compute + got.pipeline == pytest.approx(got.seconds)
    assert got.pipeline > 0


def test_sums_of_local_and_late_steps_are_waited_for_less() -> None:
    plan = Plan.parse("dp=2", SPEC.num_layers)
    sums = 1.5 * WHOLE / 2  # of which two thirds are hidden by the whole of the next step
    slow = LinkSpeed(bandwidth=step_traffic(SPEC, plan, FACTS)[0].dp / sums)
    assert predict("dp=2", slow).gradients == pytest.approx(sums, rel=1e-3)
    late = predict_step(SPEC, plan, replace(FACTS, late=True), SPEED, slow)
    assert late.gradients == pytest.approx(sums - WHOLE / 2)
    local = predict_step(SPEC, plan, replace(FACTS, local_steps=10), SPEED, slow)
    assert local.gradients == pytest.approx(sums / 10, rel=1e-3)
    halved = predict_step(SPEC, plan, replace(FACTS, compression="bf16"), SPEED, slow)
    assert halved.gradients == pytest.approx(sums / 2, rel=1e-3)


def test_the_slowest_rank_is_waited_for() -> None:
    assert predict("dp=2", speed=[SPEED, SPEED / 4]).seconds == pytest.approx(4 * WHOLE / 2)
    assert predict("dp=4:1", speed=[SPEED, SPEED / 4]).seconds < 4 * WHOLE / 2


def test_sums_over_dp_are_hidden_by_the_last_backward_pass() -> None:
    """Bucket by bucket; the rest comes on top."""
    plan = Plan.parse("dp=2", SPEC.num_layers)
    sent = step_traffic(SPEC, plan, FACTS)[0].dp
    backward = 2 * forward_flops(SPEC, [64]) / SPEED
    fast, slow = LinkSpeed(bandwidth=sent / (0.9 * backward)), LinkSpeed(bandwidth=sent / (3 * backward))
    whole = predict("dp=2", slow)
    assert whole.gradients == pytest.approx(3 * backward), "one bucket, which is full when the pass is over"
    assert whole.seconds == pytest.approx(WHOLE / 2 + 3 * backward)
    small = replace(FACTS, bucket_bytes=4096)
    assert predict_step(SPEC, plan, small, SPEED, fast).gradients < 0.1 * backward
    assert predict_step(SPEC, plan, small, SPEED, slow).gradients == pytest.approx(2 * backward, rel=0.1)
    late = predict_step(SPEC, plan, small, SPEED, fast, execution=Execution(overlap_gradients=False))
    assert late.gradients == pytest.approx(0.9 * backward, rel=1e-3), "they begin when all are made"
    # Gradients as before, and half of the weights to the other, which nothing hides.
    cut = predict("dp=2,zero=1", slow)
    assert cut.gradients == pytest.approx(1.5 * backward + 1.5 * backward, rel=0.01)
    # Each use of a layer's weights is gathered, and hidden. Gradients are summed once, after the last microbatch.
    sharded = predict("dp=2,zero=3", fast)
    assert sharded.gradients == pytest.approx(0.9 * backward / 2, rel=0.01)


@pytest.mark.parametrize(("zero", "exposed"), [(0, 0.0), (1, 0.5), (3, 0.0)])
def test_sums_of_experts_that_replicas_divide_are_hidden_too(zero: int, exposed: float) -> None:
    """All of them were predicted to come after the last backward pass; what nothing hides are gathered weights, but
    for those of each use with ZeRO 3."""
    spec = replace(SPEC, layers=(replace(SPEC.layers[0], moe=MoeSpec(6, 2, 32)),) * 8)
    plan, facts = Plan.parse(f"dp=4,ep=2,zero={zero}", SPEC.num_layers), replace(FACTS, bucket_bytes=4096)
    sent = step_traffic(spec, plan, facts)[0].edp
    way = 1.5 * forward_flops(spec, [64]) / SPEED
    groups = dict.fromkeys(("tp", "pp", "cp", "dp", "ep", "replica", "servers"), FREE)
    got = predict_step(spec, plan, facts, SPEED, {**groups, "edp": LinkSpeed(bandwidth=sent / way)})
    assert sent and exposed * way <= got.gradients < (exposed + 0.2) * way


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_stage_that_waits_for_messages_computes_nothing_meanwhile(chunks: int) -> None:
    """An op of a stage between two others sends one message and is sent one; at an end there is one of both."""
    link, of_hop = LinkSpeed(1e-3, 1e6), 64 * 64 * 4 / 1e6
    text = f"pp=4,chunks={chunks}"
    alone, waiting = (predict(text, link, execution=Execution(waits_for_hops=waits)) for waits in (False, True))
    assert alone.timeline and waiting.timeline
    share = [1 if chunks > 1 or stage in (1, 2) else 0.5 for stage in range(4)]
    more = [share * of_hop * 2 * 12 * chunks for share in share]
    busy = zip(waiting.timeline.busy, alone.timeline.busy, strict=True)
    assert [a - b for a, b in busy] == pytest.approx(more)


def test_sums_over_tp_are_waited_for() -> None:
    sent = step_traffic(SPEC, Plan.parse("tp=2", SPEC.num_layers), FACTS)[0].tp
    groups = dict.fromkeys(("pp", "cp", "dp", "edp", "ep", "replica", "servers"), FREE)
    got = predict("tp=2", {**groups, "tp": LinkSpeed(bandwidth=1e6)})
    assert got.layers == pytest.approx(sent / 1e6) and got.seconds == pytest.approx(WHOLE / 2 + sent / 1e6)
    late = predict("tp=2", LinkSpeed(latency=0.01))
    assert late.layers == pytest.approx(12 * 8 * 4 * 0.01), "two sums forward and two backward, in each layer"


@pytest.mark.parametrize(("sequence", "more"), [("false", 1), ("true", 3)])
def test_a_layer_that_is_computed_again_stops_before_its_last_sum_or_does_not(sequence: str, more: int) -> None:
    """With sequence parallelism a gather or a scatter is half of a sum. Other trainers compute the whole layer."""
    text, link = f"tp=2,recompute=layer,sequence={sequence}", LinkSpeed(latency=0.01)
    sums = 4 if sequence == "false" else 8
    assert predict(text, link).layers == pytest.approx(12 * 8 * (sums + more) * 0.01)
    whole = predict(text, link, execution=Execution(early_stop=False))
    assert whole.layers == pytest.approx(12 * 8 * 1.5 * sums * 0.01)
    stopped = predict(text, link)
    of_ends = 2 * 12 * 64 * 64 * 4  # the embedding's sum, and that of the last hidden states' gradients
    sent = [step.bytes_sent[0].tp - of_ends for step in (stopped, whole)]
    assert sent[0] / sent[1] == pytest.approx((sums + more) / (1.5 * sums), rel=0.01)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("layer", 3)])
def test_norms_over_all_heads_are_sums_of_their_own_and_experts_beside_an_mlp_are_not(
    recompute: str, passes: int
) -> None:
    """Those of queries and keys in each pass. What experts make goes in one message with what the MLP makes. A layer
    that is computed again lacks its last sum."""
    plan, link = Plan.parse(f"tp=2,recompute={recompute}", SPEC.num_layers), LinkSpeed(latency=0.01)
    beside = MoeSpec(6, 2, 32, beside_mlp=True, style="gemma4")
    for spec, more in (
        (replace(SPEC, qk_norm="full"), 2 * passes),
        (replace(SPEC, layers=(replace(SPEC.layers[0], moe=beside),) * 8), 0),
    ):
        got = predict_step(spec, plan, FACTS, SPEED, link)
        assert got.layers == pytest.approx(12 * 8 * (2 * passes - (passes == 3) + more) * 0.01)


def test_layers_without_experts_send_no_tokens_to_them() -> None:
    experts = replace(SPEC.layers[0], moe=MoeSpec(6, 2, 32))
    some = replace(SPEC, layers=(SPEC.layers[0],) * 5 + (experts,) * 3)
    got = predict_step(some, Plan.parse("dp=2,ep=2", 8), FACTS, SPEED, LinkSpeed(latency=0.01))
    assert got.layers == pytest.approx(12 / 2 * 3 * 5 * 0.01), "to them and back, with counts first; and the way back"


@pytest.mark.parametrize(("recompute", "rounds"), [("none", 3), ("selective", 4), ("layer", 4)])
def test_a_ring_goes_round_again_where_attention_is_computed_again(recompute: str, rounds: int) -> None:
    plan = Plan.parse(f"cp=2,recompute={recompute}", SPEC.num_layers)
    one, two = (predict_step(SPEC, plan, FACTS, SPEED, LinkSpeed(latency=late)).layers for late in (1.0, 2.0))
    assert two - one == pytest.approx(12 * 8 * rounds)


def test_attention_that_is_computed_again_hides_its_ring_again() -> None:
    """All three passes of a ring take as long as attention in them, or a part longer than that."""
    none, again = Plan.parse("cp=2", SPEC.num_layers), Plan.parse("cp=2,recompute=selective", SPEC.num_layers)
    core = 12 * 8 * attention_flops(SPEC, SPEC.layers[0], cut_stage(SPEC, (1,))[0], [64]) / 2 / SPEED
    groups = dict.fromkeys(("tp", "pp", "dp", "edp", "ep", "replica", "servers"), FREE)
    for plan, passes in ((none, 3), (again, 4)):
        sent = max(traffic.cp for traffic in step_traffic(SPEC, plan, FACTS))
        for times in (0.99, 1.5):
            link = LinkSpeed(bandwidth=sent / (times * passes * core))
            got = predict_step(SPEC, plan, FACTS, SPEED, {**groups, "cp": link}).layers
            assert got == pytest.approx(max(0.0, times - 1) * passes * core)


def test_a_faster_rank_has_sent_its_part_of_a_sum_before() -> None:
    """The way is waited for by less than the half of what the slower rank does longer; nothing makes meetings less."""
    sent = step_traffic(SPEC, Plan.parse("tp=2", SPEC.num_layers), FACTS)[0].tp
    fast, slow, way = WHOLE / 2, WHOLE, sent / 1e6
    got = predict("tp=2", LinkSpeed(bandwidth=1e6), [SPEED, SPEED / 2])
    assert got.seconds == pytest.approx(slow + way - (slow - fast) / 2)
    meeting = 12 * 8 * 4 * 1e-3
    got = predict("tp=2", LinkSpeed(sync_overhead=1e-3), [SPEED, SPEED / 1000])
    assert got.seconds == pytest.approx(1000 * fast + meeting)
    got = predict("tp=2", LinkSpeed(bandwidth=1e6, compute_overhead=1e-6 / 2), [SPEED, SPEED / 1000])
    assert got.seconds == pytest.approx(1000 * fast + way / 2), "and who is slow sends and takes all the same"


def test_short_messages_go_at_a_rate_of_their_own() -> None:
    plan = Plan.parse("tp=2", SPEC.num_layers)
    sent = step_traffic(SPEC, plan, FACTS)[0].tp
    groups = dict.fromkeys(("pp", "cp", "dp", "edp", "ep", "replica", "servers"), FREE)
    assert sent / (12 * 8 * 4) < SHORT_MESSAGE_BYTES, "each sum is short"
    got = predict("tp=2", {**groups, "tp": LinkSpeed(bandwidth=1e6, short_bandwidth=4e6)})
    assert got.layers == pytest.approx(sent / 4e6)
    link = LinkSpeed(bandwidth=1e6, short_bandwidth=4e6)
    assert (link.rate(SHORT_MESSAGE_BYTES), link.rate(SHORT_MESSAGE_BYTES + 1), LinkSpeed(bandwidth=1e6).rate(1)) == (
        4e6,
        1e6,
        1e6,
    )
    assert worst([link, LinkSpeed(bandwidth=2e6, short_bandwidth=3e6), FREE]).short_bandwidth == 3e6


def test_speeds_that_are_lacking_are_refused() -> None:
    with pytest.raises(PlanError, match="2 ranks compute and 1 speeds"):
        predict("dp=2", speed=[SPEED])
    with pytest.raises(PlanError, match="links of"):
        predict("tp=2", {"pp": FREE})
