"""No plan that is searched takes less than the bound on any small cluster, and without messages it is reached."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest

from benchmarks.planner.many_machines import cluster_of as machines_of
from benchmarks.planner.many_machines import model
from tests.unit.planner.search.test_serving_search import cluster_of, some_of, spec_of
from tests.unit.planner.search.test_training_search import least_seconds, seconds_of
from tllm.core.errors import ConfigError
from tllm.planner.bounds import replica_microbatches, training_bound
from tllm.planner.bounds.linear_program import most_of, with_whole_numbers
from tllm.planner.bounds.training_bound import is_bounded, least_step_seconds, relaxed_step_seconds
from tllm.planner.bounds.whole_layers import least_of_whole_layers
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Points, Tier
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.flops import training_flops
from tllm.planner.cost.link_levels import gather_link
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import SharedPrompts, TrainingFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.search.promising_meshes import WIDTHS
from tllm.planner.search.training_constraints import MICROBATCHES, TrainingConstraints
from tllm.planner.search.training_layouts import CHUNKS, MOST_DEVICES, TrainingLayouts
from tllm.planner.search.training_search import best_training
from tllm.spec.model_spec import ModelSpec, MoeSpec
from tllm.spec.plan import Plan, Stage

SIZES = (1, 2, 4)

LEVELS = Execution(collectives="levels")

ROUNDING = 1e-9
"""The simplex method stops where no step gains more than 1e-11 of the greatest value, and several steps may be left."""


def any_plan(
    draw: random.Random, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts
) -> tuple[Plan, tuple[int, ...], TrainingFacts]:
    """Some plan over some of the devices: any axes, cut, deal, schedule, ZeRO stage and recomputation."""
    size = draw.choice([one for one in SIZES if one <= facts.global_batch_size])
    facts = replace(facts, microbatch_size=size)
    tp, cp = draw.choice([(1, 1)] * 6 + [(1, 2), (2, 1), (2, 2)])
    chunks = draw.choice([1, 1, 1, 2])
    pp = draw.randint(1, max(1, min(len(cluster) // (tp * cp), spec.num_layers // chunks)))
    chunks = chunks if pp > 1 else 1
    dp = draw.randint(1, max(1, min(len(cluster) // (tp * cp * pp), facts.microbatches)))
    bounds = [0, *sorted(draw.sample(range(1, spec.num_layers), pp * chunks - 1)), spec.num_layers]
    stages = tuple(Stage(a, b, (1,) * tp) for a, b in pairwise(bounds))
    name = "interleaved" if chunks > 1 else draw.choice(["1f1b", "gpipe", "zero_bubble"])
    plan = Plan(
        stages,
        dp=tuple(draw.randint(1, 4) for _ in range(dp)) if dp > 1 else (1,),
        cp=cp,
        zero=draw.choice([0, 1, 2, 3]) if dp * cp > 1 else 0,
        sequence=tp > 1 and draw.random() < 0.5,
        schedule=name,
        depth=draw.choice([1, 2]) if name in ("1f1b", "zero_bubble") else 1,
        chunks=chunks,
        recompute=draw.choice(["none", "none", "selective", "layer"]),
    )
    devices = draw.sample(range(len(cluster)), plan.world_size) if plan.world_size <= len(cluster) else []
    return plan, tuple(devices), facts


def machines(draw: random.Random, count: int) -> Cluster:
    """Of two or three speeds, with room for some microbatches of a few layers or for many, at one or two sites."""
    speeds = [draw.choice([2e9, 4e9, 1e10, 1.3e10]) for _ in range(draw.choice([1, 2, 2, 3]))]
    room = [TRAINER_BYTES + 2**20 * draw.choice([60, 100, 200, 800]) for _ in range(2)]
    devices = tuple(
        Device(draw.choice(room), (("float32", ((1.0, speed),)),), 1e10) for speed in draw.choices(speeds, k=count)
    )
    node_of = [0]
    for _ in range(count - 1):
        node_of.append(node_of[-1] + (draw.random() < 0.8))
    nodes = node_of[-1] + 1
    places = [draw.randrange(2) for _ in range(nodes)]
    links = [link_of(draw) for _ in range(4)]
    return Cluster(
        names=tuple(f"n{i}" for i in range(nodes)),
        devices=devices,
        node_of=tuple(node_of),
        inside=(links[3],) * nodes,
        default=links[2],
        tiers=tuple(
            Tier(f"site{site}", tuple(0 if there == site else -1 for there in places), links[site]) for site in range(2)
        ),
    )


def link_of(draw: random.Random) -> LinkSpeed:
    """Some have another bandwidth for short messages, which is higher or lower."""
    bandwidth = draw.choice([2e6, 1e7, 1e8, 1e9])
    return LinkSpeed(
        draw.choice([0.0, 1e-4]), bandwidth, short_bandwidth=draw.choice([0.0, 0.0, 0.5, 3.0, 100.0]) * bandwidth
    )


def any_model(draw: random.Random, layers: int) -> ModelSpec:
    """A quarter has layers of millions of elements, whose gradients are no short messages but whose sums are; another
    has one table for both ends."""
    spec = spec_of(layers)
    if draw.random() < 0.25:
        spec = replace(spec, hidden_size=512, intermediate_size=2048, vocab_size=500)
    return replace(spec, tied=draw.random() < 0.25)


def any_facts(draw: random.Random, rows: int) -> TrainingFacts:
    """Half of the jobs are plain."""
    seq_len = draw.choice([16, 64])
    more: dict[str, Any] = draw.choice(
        [{}] * 6
        + [
            {"compression": "bf16"},
            {"compression": "int8"},
            {"compression": "powersgd", "powersgd_rank": 2},
            {"late": True},
            {"local_steps": 4},
            {"value_pass": True},
            {"shared_prompts": SharedPrompts(seq_len // 2, seq_len - seq_len // 2, draw.choice([2, 4]))},
        ]
    )
    return TrainingFacts(seq_len, rows, **more)


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


@pytest.mark.parametrize("seed", some_of(60, 8))
def test_no_plan_takes_less(seed: int) -> None:
    draw = random.Random(2000 + seed)
    moe = MoeSpec(num_experts=4, top_k=2, width=256) if draw.random() < 0.2 else None
    spec = spec_of(draw.randint(1, 3), draw.choice([(None,), (16, None)]), moe)
    cluster = cluster_of(draw, 2)
    if draw.random() < 0.5:
        cluster = with_other_rates(draw, cluster)
    facts = TrainingFacts(draw.choice([8, 64]), draw.randint(1, 3), target_tokens=draw.choice([None, 5]))
    if draw.random() < 0.3:
        late = draw.choice([(), (spec.num_layers - 1,)])
        facts = replace(facts, adapter=AdapterFacts(rank=2, targets=("q_proj", "v_proj"), layers=late))
    bound = least_step_seconds(spec, cluster, facts, SIZES)
    assert (
        0
        < relaxed_step_seconds(spec, cluster, facts, SIZES)
        <= bound
        <= least_seconds(spec, cluster, facts) * (1 + ROUNDING)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", some_of(200, 12))
def test_no_plan_of_up_to_six_machines_takes_less(seed: int) -> None:
    """Plans at random of 2 to 6 machines, whose gradients take long beside products or do not."""
    draw = random.Random(7000 + seed)
    spec, cluster = any_model(draw, draw.randint(1, 8)), machines(draw, draw.randint(2, 6))
    facts = any_facts(draw, draw.randint(4, 32))
    compare(draw, spec, cluster, facts)


@pytest.mark.parametrize("seed", some_of(60, 4))
def test_beside_an_adapter_of_late_layers_no_plan_takes_less(seed: int) -> None:
    """As above, where some or none of the first layers run no backward pass, and rows are shorter than they may be."""
    draw = random.Random(13_000 + seed)
    spec, cluster = any_model(draw, draw.randint(2, 8)), machines(draw, draw.randint(2, 6))
    cluster = with_other_rates(draw, cluster) if draw.random() < 0.5 else cluster
    late = tuple(range(draw.randrange(spec.num_layers), spec.num_layers))
    adapter = AdapterFacts(2, ("q_proj",) if seed % 2 else ("down_proj",), layers=late)
    facts = replace(any_facts(draw, draw.randint(4, 24)), adapter=adapter)
    if facts.shared_prompts is None and draw.random() < 0.5:
        each = facts.seq_len // draw.choice([1, 2])
        facts = replace(facts, documents=(each // 2,) * 2, mean_lengths=True, target_tokens=each // 4)
    compare(draw, spec, cluster, facts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", some_of(100, 8))
def test_with_hierarchical_collectives_no_plan_of_up_to_eight_machines_takes_less(seed: int) -> None:
    """Of nodes with one to four devices each, whose links inside and beyond are unlike, some of single pairs."""
    draw = random.Random(9000 + seed)
    spec, facts = any_model(draw, draw.randint(1, 6)), any_facts(draw, draw.randint(4, 32))
    compare(draw, spec, with_nodes(draw, machines(draw, draw.randint(3, 8))), facts, LEVELS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", some_of(60, 3))
def test_no_plan_that_is_found_takes_less(seed: int) -> None:
    """The best of some hundred plans of 3 to 5 machines, which is nearer to the bound than any at
    random."""
    draw = random.Random(11_000 + seed)
    spec, cluster = any_model(draw, draw.randint(3, 6)), machines(draw, draw.randint(3, 5))
    facts = any_facts(draw, draw.choice([4, 8, 12, 24]))
    rooms = [TRAINER_BYTES + 2**20 * draw.choice([400, 800, 1600]) for _ in cluster.devices]
    devices = (replace(device, memory=room) for device, room in zip(cluster.devices, rooms, strict=True))
    cluster = replace(cluster, devices=tuple(devices))
    best = best_training(spec, cluster, facts, steps=200).choices[0]
    assert is_bounded(best.placed.plan, len(cluster), facts)
    bound = least_step_seconds(spec, cluster, facts, MICROBATCHES)
    assert bound <= best.predicted.seconds * (1 + ROUNDING), f"{best.placed.plan} on {best.placed.devices}"


def compare(
    draw: random.Random, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, execution: Execution | None = None
) -> None:
    """The bound with plans at random."""
    bound = least_step_seconds(spec, cluster, facts, SIZES)
    assert relaxed_step_seconds(spec, cluster, facts, SIZES) <= bound
    for _ in range(150):
        plan, devices, sized = any_plan(draw, spec, cluster, facts)
        if devices:
            seconds = seconds_of(spec, plan, sized, cluster, devices, execution)
            assert bound <= seconds * (1 + ROUNDING), f"{plan} on {devices}, {sized}"


def with_nodes(draw: random.Random, cluster: Cluster) -> Cluster:
    """The same devices on fewer nodes, with hierarchical collectives, rates over rows, and a few links of pairs."""
    node_of = [0]
    for _ in range(len(cluster) - 1):
        node_of.append(node_of[-1] + (draw.random() < 0.5))
    nodes = node_of[-1] + 1
    pairs = {(a, b): link_of(draw) for a in range(nodes) for b in range(nodes) if a != b and draw.random() < 0.3}
    return replace(
        cluster,
        names=cluster.names[:nodes] + tuple(f"m{i}" for i in range(nodes - len(cluster.names))),
        devices=tuple(replace(one, flop_rates=over_rows(draw, one)) for one in cluster.devices),
        node_of=tuple(node_of),
        inside=tuple(link_of(draw) for _ in range(nodes)),
        tiers=tuple(
            replace(tier, group_of=tuple(draw.choice([-1, 0, 1]) for _ in range(nodes))) for tier in cluster.tiers
        ),
        pairs=tuple(pairs.items()),
        execution=LEVELS,
    )


def over_rows(draw: random.Random, device: Device) -> tuple[tuple[str, Points], ...]:
    """Its speed reached with many rows, or with few."""
    ((dtype, ((_, speed),)),) = device.flop_rates
    return (
        (dtype, draw.choice([((1.0, speed),), ((1.0, speed / 3), (40.0, speed)), ((8.0, speed), (60.0, speed / 2))])),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", some_of(100, 1))
@pytest.mark.parametrize("execution", [None, LEVELS], ids=["flat", "levels"])
def test_no_plan_of_all_of_two_or_three_machines_takes_less(seed: int, execution: Execution | None) -> None:
    """As above, but every plan there is."""
    draw = random.Random(8000 + seed)
    count = draw.choice([2, 2, 3])
    spec, cluster = any_model(draw, draw.randint(1, 6 - count)), machines(draw, count)
    facts = any_facts(draw, draw.randint(2, 8 - count))
    cluster = cluster if execution is None else with_nodes(draw, cluster)
    bound = least_step_seconds(spec, cluster, facts, SIZES)
    assert bound <= least_seconds(spec, cluster, facts, execution) * (1 + ROUNDING)


@pytest.mark.parametrize("seed", range(10))
def test_hierarchical_collectives_are_no_faster_than_the_fastest_link_of_any_device(seed: int) -> None:
    draw = random.Random(12_000 + seed)
    for _ in range(30):
        cluster = with_nodes(draw, machines(draw, draw.randint(2, 12)))
        devices = draw.sample(range(len(cluster)), draw.randint(2, len(cluster)))
        fastest = max(cluster.link(a, b).bandwidth for a in devices for b in devices if a != b)
        assert gather_link(cluster, devices).bandwidth <= fastest * (1 + ROUNDING)


def test_microbatches_are_whole() -> None:
    """Of three rows one of two machines does two, though one and a half each would be faster."""
    spec, device = spec_of(2), Device(2**36, (("float32", ((1.0, 1e10),)),), 1e10)
    two = Cluster(("a", "b"), (device,) * 2, (0, 1), (None, None), LinkSpeed(0.0, 1e15))
    row = training_flops(spec, [64]) / 1e10
    bound = least_of_replicas(spec, two, TrainingFacts(64, 3), row)
    assert bound == pytest.approx(2 * row, rel=1e-5)
    assert relaxed_step_seconds(spec, two, TrainingFacts(64, 3), (1,)) == pytest.approx(1.5 * row)


def least_of_replicas(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, row: float) -> float:
    """The bound of microbatches of one row without tensor parallelism and rings, if it is some rows' seconds."""
    size = training_bound._of_rank(facts, 1, cluster.devices)
    count = len(cluster)
    return least_of_whole_layers(spec, [size], [1e15] * count, [2.0**36] * count, row, 4 * row)


def test_a_device_alone_on_its_node_sends_less_by_hierarchical_collectives() -> None:
    """It exchanges half of all gradients with the other node, where by flat ones each of three sends two thirds."""
    spec = replace(spec_of(2), hidden_size=64, intermediate_size=256, num_heads=2, num_kv_heads=2, vocab_size=16)
    device = Device(2**36, (("float32", ((1.0, 1e9),)),), 1e12)
    links = (LinkSpeed(0.0, 1e6), None)
    flat = Cluster(("a", "b"), (device,) * 3, (0, 0, 1), links, LinkSpeed(0.0, 1e5))
    facts, plan = TrainingFacts(128, 600), Plan((Stage(0, 2, (1,)),), dp=(1, 1, 1), zero=1)
    seconds = seconds_of(spec, plan, facts, flat, (0, 1, 2), LEVELS)
    assert least_step_seconds(spec, replace(flat, execution=LEVELS), facts, (1,)) <= seconds
    assert seconds < least_step_seconds(spec, flat, facts, (1,)) <= seconds_of(spec, plan, facts, flat, (0, 1, 2))


@pytest.mark.parametrize("times", [0.0, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("sequence", [False, True])
def test_sums_inside_layers_are_short_messages(times: float, sequence: bool) -> None:
    """The gradients of such a layer are long ones, which are slower."""
    spec = replace(spec_of(2), hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=8, head_dim=64)
    device = Device(2**36, (("float32", ((1.0, 1e11),)),), 1e10)
    cluster = Cluster(("a", "b"), (device,) * 2, (0, 1), (None, None), LinkSpeed(0.0, 3e8, short_bandwidth=times * 3e8))
    facts, plan = TrainingFacts(64, 1), Plan((Stage(0, 2, (1, 1)),), sequence=sequence)
    assert is_bounded(plan, 2, facts)
    assert least_step_seconds(spec, cluster, facts, (1,)) <= seconds_of(spec, plan, facts, cluster, (0, 1))


def test_sums_of_experts_beside_an_mlp_where_late_layers_are_adapted() -> None:
    """With sequence parallelism a layer without a backward pass gathers twice and scatters three times: of two ranks
    less than three sums."""
    spec = replace(spec_of(12, moe=MoeSpec(num_experts=4, top_k=2, width=256, beside_mlp=True)), vocab_size=8)
    device = Device(2**36, (("float32", ((1.0, 1e10),)),), 1e10)
    cluster = Cluster(("a", "b"), (device,) * 2, (0, 1), (None, None), LinkSpeed(0.0, 8e8))
    facts = TrainingFacts(3, 2, 2, adapter=AdapterFacts(2, ("q_proj",), layers=(11,)))
    plan = Plan((Stage(0, 12, (1, 1)),), sequence=True)
    seconds = seconds_of(spec, plan, facts, cluster, (0, 1))
    assert 0.98 * seconds < least_step_seconds(spec, cluster, facts, (2,)) <= seconds


def test_a_plan_with_tensor_parallelism_in_some_stages_may_be_below_the_bound_and_is_not_compared() -> None:
    spec = replace(spec_of(3), vocab_size=5000)
    devices = tuple(Device(2**36, (("float32", ((1.0, speed),)),), 1e10) for speed in (1.4e9, 0.93e9, 0.93e9))
    cluster = Cluster(("a", "b", "c"), devices, (0, 1, 2), (None,) * 3, LinkSpeed(0.0, 4.2e6))
    plan = Plan((Stage(0, 2, (1,)), Stage(2, 3, (1, 1))), schedule="zero_bubble")
    facts = TrainingFacts(24, 16)
    assert seconds_of(spec, plan, facts, cluster, (0, 1, 2)) < least_step_seconds(spec, cluster, facts, SIZES)
    assert not is_bounded(plan, 3, facts)
    assert not is_bounded(Plan((Stage(0, 3, (1,)),), servers=1), 3, facts)
    chunks = Plan(tuple(Stage(i, i + 1, (1,)) for i in range(10)), chunks=5, schedule="interleaved")
    assert not is_bounded(chunks, 3, facts)
    assert not is_bounded(Plan((Stage(0, 3, (1,) * 4),), tensor="2d"), 4, facts)
    ring = Plan((Stage(0, 3, (1,)),), cp=3)
    assert is_bounded(ring, 3, facts) and not is_bounded(ring, 20, facts)


def test_no_more_ranks_share_a_row_than_it_has_tokens_for() -> None:
    """Rows of three tokens on an average, of which no two ranks have two pieces each."""
    spec, device = spec_of(2), Device(2**36, (("float32", ((1.0, 1e10),)),), 1e10)
    cluster = Cluster(tuple("abcd"), (device,) * 4, (0, 1, 2, 3), (None,) * 4, LinkSpeed(0.0, 1e6))
    facts = TrainingFacts(64, 8, documents=(3,), target_tokens=2, mean_lengths=True, row_tokens=3)
    best = best_training(spec, cluster, facts, steps=100).choices[0]
    assert best.placed.plan.cp == 1
    assert 0 < least_step_seconds(spec, cluster, facts, SIZES) <= best.predicted.seconds


def test_rings_are_those_that_the_search_tries() -> None:
    assert training_bound.RINGS == WIDTHS and training_bound.FEW_DEVICES == MOST_DEVICES


def test_replicas_that_must_sum_gradients_wait_for_them() -> None:
    """Equal machines that hold too few rows to hide what they send: the bound comes near to the best plan. It
    does not count the embedding, which is a quarter of this model."""
    spec = spec_of(2)
    device = Device(TRAINER_BYTES + 200 * 2**20, (("float32", ((1.0, 1e10),)),), 1e10)
    cluster = Cluster(("a", "b"), (device,) * 2, (0, 1), (None, None), LinkSpeed(0.0, 1e7))
    facts = TrainingFacts(64, 16)
    bound, best = least_step_seconds(spec, cluster, facts, SIZES), least_seconds(spec, cluster, facts)
    assert 1.02 * relaxed_step_seconds(spec, cluster, facts, SIZES) < bound <= best < 1.2 * bound


@pytest.mark.slow
def test_the_gap_of_many_unlike_machines_is_smaller_than_that_to_the_relaxation() -> None:
    cluster, facts = machines_of(100), TrainingFacts(1024, 6400, dtype="bfloat16")
    bound = least_step_seconds(model(), cluster, facts, MICROBATCHES)
    assert bound > 1.04 * relaxed_step_seconds(model(), cluster, facts, MICROBATCHES)


def test_chunks_are_those_that_the_search_tries() -> None:
    assert max(CHUNKS) == replica_microbatches.MOST_CHUNKS


@pytest.mark.parametrize("seed", range(20))
def test_small_linear_programs(seed: int) -> None:
    """Against all corners: of n unknowns and m rows, n of the n + m limits hold exactly."""
    draw = random.Random(seed)
    rows, columns = draw.randint(1, 3), draw.randint(1, 4)
    values = [draw.uniform(0, 3) for _ in range(columns)]
    demands = [[float(draw.randint(0, 3)) for _ in range(rows - 1)] + [1.0] for _ in range(columns)]
    supplies = [draw.uniform(0, 5) for _ in range(rows)]
    limits = [([row[i] for row in demands], supplies[i]) for i in range(rows)]
    limits += [([-float(i == j) for i in range(columns)], 0.0) for j in range(columns)]
    best = 0.0
    for chosen in combinations(limits, columns):
        matrix, right = np.array([row for row, _ in chosen]), np.array([value for _, value in chosen])
        if abs(np.linalg.det(matrix)) > 1e-9:
            x = np.linalg.solve(matrix, right)
            if all(np.dot(row, x) <= value + 1e-9 for row, value in limits):
                best = max(best, float(np.dot(values, x)))
    assert most_of(values, demands, supplies) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_limits_for_whole_numbers_leave_out_none(seed: int) -> None:
    draw = random.Random(seed)
    rows, columns = draw.randint(1, 3), draw.randint(1, 3)
    values = [draw.uniform(0, 3) for _ in range(columns)]
    demands = [[float(draw.randint(0, 3)) for _ in range(rows)] + [float(draw.randint(1, 3))] for _ in range(columns)]
    supplies = [draw.uniform(0, 7) for _ in range(rows + 1)]
    best = max(
        sum(x * value for x, value in zip(chosen, values, strict=True))
        for chosen in product(range(8), repeat=columns)
        if all(
            sum(x * demand[i] for x, demand in zip(chosen, demands, strict=True)) <= supply
            for i, supply in enumerate(supplies)
        )
    )
    limited = most_of(values, *with_whole_numbers(demands, supplies))
    assert best <= limited * (1 + ROUNDING) + 1e-12 and limited <= most_of(values, demands, supplies) * (1 + ROUNDING)


def test_whole_numbers_are_fewer() -> None:
    assert most_of([1.0], *with_whole_numbers([[2.0]], [5.0])) == 2.0 < most_of([1.0], [[2.0]], [5.0])


def test_a_linear_program_without_a_limit_is_infinite() -> None:
    assert most_of([1.0, 1.0], [[1.0], [0.0]], [2.0]) == math.inf


def test_of_one_device_it_is_what_the_step_takes() -> None:
    spec, device = spec_of(3), Device(2**34, (("float32", ((1.0, 3e9),)),), 1e10)
    cluster, facts = Cluster(("a",), (device,), (0,), (None,)), TrainingFacts(64, 3)
    seconds = training_flops(spec, [64]) * 3 / 3e9
    assert least_step_seconds(spec, cluster, facts, (1,)) == pytest.approx(seconds, rel=1e-12)
    assert least_seconds(spec, cluster, facts) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_of_one_device_beside_an_adapter_it_is_that_too(layers: tuple[int, ...]) -> None:
    """Attention, of which most of these long rows' layers are, has all of its gradients."""
    spec, device = spec_of(3), Device(2**36, (("float32", ((1.0, 3e9),)),), 1e10)
    facts = TrainingFacts(8192, 2, adapter=AdapterFacts(2, ("q_proj",), layers=layers))
    cluster = Cluster(("a",), (device,), (0,), (None,))
    seconds = 2 * training_flops(spec, [8192], is_frozen=True, forward_only=layers[0] if layers else 0) / 3e9
    assert least_step_seconds(spec, cluster, facts, (1,)) == pytest.approx(seconds, rel=1e-12)
    assert least_seconds(spec, cluster, facts) == pytest.approx(seconds, rel=1e-12)
    (first, *_) = TrainingLayouts(spec, cluster, facts, TrainingConstraints((1,)))
    assert first.lower_bound == pytest.approx(seconds, rel=1e-12)


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


@pytest.mark.parametrize("count", [1, 3])
def test_where_no_microbatch_fits_layers_are_recomputed(count: int) -> None:
    """Which takes a forward pass more of layers, or waits for tensor parallelism."""
    device = Device(TRAINER_BYTES + 2**20, (("float32", ((1.0, 3e9),)),), 1e10)
    cluster = Cluster(
        tuple("abc")[:count], (device,) * count, tuple(range(count)), (None,) * count, LinkSpeed(0.0, 1e3)
    )
    facts = TrainingFacts(64, 4)
    bound, relaxed = (of(spec_of(2), cluster, facts, (1, 2)) for of in (least_step_seconds, relaxed_step_seconds))
    assert 1.1 * relaxed < bound < 4 / 3 * relaxed


def test_logits_at_a_higher_rate_make_recomputed_layers_no_faster() -> None:
    """On a machine that has room for a microbatch only where layers are recomputed."""
    device = Device(
        TRAINER_BYTES + 925 * 2**20, (("float32", ((1.0, 2e9),)),), 1e10, logits_rates=(("float32", ((1.0, 3e10),)),)
    )
    cluster, facts, stages = Cluster(("a",), (device,), (0,), (None,)), TrainingFacts(2048, 2), (Stage(0, 24, (1,)),)
    none, layer = (
        seconds_of(spec_of(24), Plan(stages, recompute=again), facts, cluster, (0,)) for again in ("none", "layer")
    )
    assert layer < none == math.inf
    assert least_step_seconds(spec_of(24), cluster, facts, (1,)) == pytest.approx(layer)


def test_an_unknown_dtype_is_said() -> None:
    cluster = Cluster(("a",), (Device(2**34, (("float32", ((1.0, 3e9),)),), 1e10),), (0,), (None,))
    with pytest.raises(ConfigError, match="no speed in bfloat16"):
        least_step_seconds(spec_of(1), cluster, TrainingFacts(8, 1, dtype="bfloat16"), (1,))
