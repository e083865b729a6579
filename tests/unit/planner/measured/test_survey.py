"""What a survey says of machines, how it is kept, and how a run corrects it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.core.errors import ConfigError
from tllm.planner.cost.flops import BACKWARD, attention_flops, layer_flops, logits_flops
from tllm.planner.cost.rank_bytes import kv_bytes
from tllm.planner.cost.rank_work import SharedPrompts, TrainingFacts
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts
from tllm.planner.cost.stage_team import StageTeam, read_elements
from tllm.planner.cost.weight_bits import mean_linear_bytes
from tllm.planner.measured.outcome import Outcome, StepNumbers, TrainingOutcome, median, refitted, save_outcome
from tllm.planner.measured.survey import (
    Goal,
    Survey,
    SurveyedNode,
    SurveyedPass,
    SurveyedPath,
    cluster_of,
    digest,
    read_survey,
)
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.cut import cut_stage
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_bits import Coding, Quantization

SPEC = spec_of(4)
RATE, HEAD_RATE, START = 2e9, 1e9, 3e-4
KEYS = 100


def serving_node(name: str, host: str = "", speed: float = 1.0) -> SurveyedNode:
    """A machine of a constant rate on which each layer begins with `START` seconds, whatever its cut."""
    passes = []
    for ranks in (1, 2):
        cut = cut_stage(SPEC, (1,) * ranks)[0]
        attention = attention_flops(SPEC, SPEC.layers[0], cut, (1,))
        one = layer_flops(SPEC, SPEC.layers[0], cut, (1,)) + KEYS * attention
        passes.append(SurveyedPass(1, 1, ranks, START + one / (speed * RATE), KEYS))
        passes.append(
            SurveyedPass(64, 64, ranks, START + layer_flops(SPEC, SPEC.layers[0], cut, (64,)) / (speed * RATE)),
        )
    whole = cut_stage(SPEC, (1,))[0]
    logits = SurveyedPass(1, 1, 1, logits_flops(SPEC, whole, 1) / (speed * HEAD_RATE))
    return SurveyedNode(
        node=name,
        host_name=host or name,
        cores=2,
        threads=1,
        busy=1.0,
        memory_bytes=2**32,
        layers=tuple(passes),
        logits=(logits,),
    )


def training_node(name: str, speed: float = 1.0) -> SurveyedNode:
    whole = cut_stage(SPEC, (1,))[0]
    both = 1 + BACKWARD
    layers = [
        SurveyedPass(
            rows, 32, 1, both * layer_flops(SPEC, SPEC.layers[0], whole, (32,) * (rows // 32)) / (speed * RATE)
        )
        for rows in (32, 128)
    ]
    logits = [
        SurveyedPass(rows, 32, 1, both * logits_flops(SPEC, whole, rows) / (speed * HEAD_RATE)) for rows in (32, 128)
    ]
    return SurveyedNode(
        node=name,
        host_name=name,
        cores=2,
        threads=1,
        busy=1.0,
        memory_bytes=2**32,
        layers=tuple(layers),
        logits=tuple(logits),
        update=1e-9,
    )


def survey_of(goal: Goal, *nodes: SurveyedNode) -> Survey:
    pairs = [(a, b) for a in range(len(nodes)) for b in range(len(nodes)) if a != b]
    ways = tuple(SurveyedPath(a, b, 1e-4, 1e8) for a, b in pairs)
    return Survey(model=digest(SPEC), goal=goal, dtype="float32", nodes=nodes, paths=ways, intra_host="memory")


def test_a_layer_takes_what_it_took_whole_and_cut() -> None:
    """Of a half the start is not halved: so much the passes through a whole layer and a half tell."""
    cluster = cluster_of(survey_of("serve", serving_node("a"), serving_node("b")), SPEC)
    facts = ServingFacts("float32", KEYS, 40)
    for ranks in (1, 2):
        team = StageTeam(SPEC, cluster, range(ranks), cut_stage(SPEC, (1,) * ranks), facts)
        cut = cut_stage(SPEC, (1,) * ranks)[0]
        flops = layer_flops(SPEC, SPEC.layers[0], cut, (1,)) + (KEYS - 1) * attention_flops(
            SPEC, SPEC.layers[0], cut, (1,)
        )
        found = team.layer_time(SPEC.layers[0], ExpectedBatch(1, 1, KEYS, 1))
        assert found.compute + found.memory + found.operations == pytest.approx(START + flops / RATE, rel=0.02)
    last = StageTeam(SPEC, cluster, (0,), cut_stage(SPEC, (1,)), facts)
    ends = last.ends_time(False, True, ExpectedBatch(1, 1, 9, 1))
    assert ends.seconds == pytest.approx(logits_flops(SPEC, cut_stage(SPEC, (1,))[0], 1) / HEAD_RATE)


def test_weights_of_few_bits_and_keys_are_read_at_speeds_of_their_own() -> None:
    """A machine whose layers take as long as their codes are read, for one row and for eight, and then for the keys.

    As if the codes were plain numbers, two rows took 0.6 times that, and keys were read at seven times the speed of
    codes.
    """
    spec = replace(SPEC, quantization=Quantization("int4", ((r".*_proj", Coding(4, 32)),)))
    (whole,), layer, codes, keys_read = cut_stage(spec, (1,)), spec.layers[0], 2e9, 4e9
    seconds = read_elements(spec, layer, whole, 1) * mean_linear_bytes(spec, 4) / codes
    passes = tuple(SurveyedPass(rows, 1, 1, most * seconds) for rows, most in ((1, 1), (8, 1), (64, 8)))
    node = msgspec.structs.replace(serving_node("a"), layers=passes, keys_read=keys_read)
    cluster = cluster_of(survey_of("serve", node), spec)
    team = StageTeam(spec, cluster, (0,), (whole,), ServingFacts("float32", KEYS, 40))
    for rows in (1, 2, 4, 8):
        assert team.layer_time(layer, ExpectedBatch(rows, rows, 1, rows)).seconds == pytest.approx(seconds, rel=0.01)
    many = 10**6
    behind = team.layer_time(layer, ExpectedBatch(1, 1, many, 1)).seconds
    assert behind == pytest.approx(seconds + many * kv_bytes(spec, layer, whole, 4, "auto") / keys_read, rel=1e-3)
    assert node.slower(2).keys_read == keys_read / 2
    (device,) = cluster_of(survey_of("serve", serving_node("a")), SPEC).devices
    assert device.cache_bandwidth == device.memory_bandwidth, "of plain weights"


def test_a_step_takes_layers_logits_and_update() -> None:
    cluster = cluster_of(survey_of("train", training_node("a")), SPEC)
    facts = TrainingFacts(32, 4, 4)
    found = PlacedPlan(SPEC, Plan.parse("pp=1", SPEC.num_layers), facts, cluster, (0,)).predict()
    whole = cut_stage(SPEC, (1,))[0]
    layers = SPEC.num_layers * layer_flops(SPEC, SPEC.layers[0], whole, (32,) * 4) / RATE
    logits = logits_flops(SPEC, whole, 128) / HEAD_RATE
    elements = (found.seconds - (1 + BACKWARD) * (layers + logits)) / 1e-9
    assert found.compute == pytest.approx((1 + BACKWARD) * (layers + logits))
    assert elements == pytest.approx(4000 * 256 * 2 + 4 * (256 * 256 * 3 + 3 * 256 * 1024), rel=0.02)


def test_of_a_training_layer_that_is_cut_the_fixed_part_is_not() -> None:
    """A third of a layer takes what half of it and the whole say: here a fifth of the whole shrinks by no cut."""
    node = training_node("a")
    halves = [msgspec.structs.replace(one, ranks=2, seconds=(0.2 + 0.8 / 2) * one.seconds) for one in node.layers]
    node = msgspec.structs.replace(node, layers=(*node.layers, *halves))
    (device,) = cluster_of(survey_of("train", node), SPEC).devices
    whole = 1 / device.cut_rate("float32", 128, 1.0)
    for part in (1 / 3, 1 / 2, 3 / 4, 1.0):
        assert part / device.cut_rate("float32", 128, part) == pytest.approx((0.2 + 0.8 * part) * whole)


def test_a_way_back_in_halves_takes_longer() -> None:
    nodes = [msgspec.structs.replace(training_node(name), split=1.25) for name in ("a", "b")]
    cluster = cluster_of(survey_of("train", *nodes), SPEC)
    facts = TrainingFacts(32, 4, 4)
    one, other = (
        PlacedPlan(SPEC, Plan.parse(f"pp=2,schedule={order}", SPEC.num_layers), facts, cluster, (0, 1)).predict()
        for order in ("1f1b", "zero_bubble")
    )
    logits = (1 + BACKWARD) * logits_flops(SPEC, cut_stage(SPEC, (1,))[0], 128) / HEAD_RATE
    assert other.compute > one.compute
    assert other.compute <= logits + 1.25 * (one.compute - logits) * 1.01


def test_a_token_takes_the_drivers_turn_too() -> None:
    turns = (SurveyedPass(1, 1, 1, 2e-3, KEYS), SurveyedPass(8, 1, 1, 4e-3, KEYS))
    node = msgspec.structs.replace(serving_node("a"), turns=turns)
    plain, turning = (cluster_of(survey_of("serve", one), SPEC) for one in (serving_node("a"), node))
    plan = Plan.parse("pp=1", SPEC.num_layers)
    for concurrency, turn in ((1, 2e-3), (8, 4e-3)):
        facts = ServingFacts("float32", KEYS, 40, concurrency)
        before, after = (predict_serving(SPEC, plan, one, (0,), facts).per_token for one in (plain, turning))
        assert after - before == pytest.approx(turn)


def per_token(
    text: str, nodes: Sequence[SurveyedNode], concurrency: int = 1, ways: Sequence[SurveyedPath] | None = None
) -> float:
    """Predicted seconds, over these ways if they are given."""
    plan, facts = Plan.parse(text, SPEC.num_layers), ServingFacts("float32", KEYS, 40, concurrency)
    survey, devices = survey_of("serve", *nodes), tuple(range(plan.world_size))
    survey = msgspec.structs.replace(survey, paths=tuple(survey.paths if ways is None else ways))
    return predict_serving(SPEC, plan, cluster_of(survey, SPEC), devices, facts).per_token


@pytest.mark.parametrize(("text", "count"), [("pp=2", 1), ("pp=3", 2), ("pp=1", 0), ("tp=2", 1)])
def test_stages_that_follow_take_their_step_too(text: str, count: int) -> None:
    follows = (SurveyedPass(1, 1, 1, 3e-3, KEYS), SurveyedPass(8, 1, 1, 5e-3, KEYS))
    nodes = [serving_node(name) for name in "abc"]
    following = [msgspec.structs.replace(node, follows=follows) for node in nodes]
    assert per_token(text, following) - per_token(text, nodes) == pytest.approx(count * 3e-3)


@pytest.mark.parametrize(("text", "concurrency", "count"), [("pp=3", 1, 3), ("pp=3", 3, 0), ("pp=1", 1, 0)])
def test_stages_of_a_ring_that_is_not_full_take_longer_after_each_wait(text: str, concurrency: int, count: int) -> None:
    nodes = [serving_node(name) for name in "abc"]
    resting = [msgspec.structs.replace(node, rest=4e-3) for node in nodes]
    longer = per_token(text, resting, concurrency) - per_token(text, nodes, concurrency)
    assert longer == pytest.approx(count * 4e-3)


@pytest.mark.parametrize(
    ("text", "concurrency", "count"), [("pp=1", 1, 1), ("pp=3", 3, 3), ("pp=3", 1, 0), ("tp=2", 1, 0)]
)
def test_layers_take_longer_in_a_step_that_was_not_waited_for(text: str, concurrency: int, count: int) -> None:
    """After a wait, and between sums, they take longer still, which is measured there."""
    nodes = [serving_node(name) for name in "abc"]
    cooled = [msgspec.structs.replace(node, cooled=2e-3) for node in nodes]
    assert per_token(text, cooled, concurrency) - per_token(text, nodes, concurrency) == pytest.approx(count * 2e-3)


@pytest.mark.parametrize(("text", "count"), [("tp=2", 2 * SPEC.num_layers + 2), ("pp=2", 2), ("pp=1", 0)])
def test_ranks_lose_time_where_they_meet(text: str, count: int) -> None:
    """At two sums in each layer, one at the model's start, and as a batch is told before; at each hop."""
    nodes = serving_node("a"), serving_node("b")
    ways = [msgspec.structs.replace(way, meeting=1e-3) for way in survey_of("serve", *nodes).paths]
    assert per_token(text, nodes, ways=ways) - per_token(text, nodes) == pytest.approx(count * 1e-3)


def test_ranks_that_share_layers_lose_what_was_measured_of_that() -> None:
    """In each sum and as a batch is told; hops go on as they were. Of several ways the middle counts."""
    nodes = [serving_node(name) for name in "abc"]
    ways = [msgspec.structs.replace(way, meeting=1e-3) for way in survey_of("serve", *nodes).paths]
    shared = [msgspec.structs.replace(way, shared=2e-3 if place else 9e-3) for place, way in enumerate(ways)]
    found = [per_token(text, nodes, ways=shared) - per_token(text, nodes, ways=ways) for text in ("tp=3", "pp=3")]
    assert found == [pytest.approx((2 * SPEC.num_layers + 2) * 1e-3), 0.0]


def test_a_leader_takes_what_comes_and_tells_the_others_of_its_stage() -> None:
    """A hop goes from leader to leader; the ways to the others count once, for all of them in turn."""
    nodes = [serving_node(name) for name in "abcd"]
    survey, text = survey_of("serve", *nodes), "pp=2,tp=1+3"
    far = [
        msgspec.structs.replace(way, latency=1.0) if {way.source, way.target} in ({0, 2}, {0, 3}) else way
        for way in survey.paths
    ]
    assert per_token(text, nodes, ways=far) == per_token(text, nodes), "nothing goes there to who is no leader"
    cluster, facts = cluster_of(survey, SPEC), ServingFacts("float32", KEYS, 40)
    team = StageTeam(SPEC, cluster, (1, 2, 3), cut_stage(SPEC, (1, 1, 1)), facts)
    alone = StageTeam(SPEC, cluster, (1,), cut_stage(SPEC, (1,)), facts)
    batch = ExpectedBatch(1, 1, KEYS, 0)
    link = team.link
    told = link.latency + link.sync_overhead + 2 * SPEC.hidden_size * 4 / link.rate(0)
    assert team.ends_time(False, False, batch).seconds - alone.ends_time(False, False, batch).seconds == pytest.approx(
        told
    )


@pytest.mark.parametrize(("stage", "share"), [(0, 0.5), (1, 1.0), (2, 0.5)])
def test_who_sends_computes_later_by_what_was_measured(stage: int, share: float) -> None:
    """With each op a stage takes rows and gives rows; where the pipeline ends it does only one of the two."""
    facts, plan, found = TrainingFacts(32, 4, 1), Plan.parse("pp=3", SPEC.num_layers), []
    survey = survey_of("train", training_node("a"), training_node("b"), training_node("c"))
    for effort in (0.0, 1e-7, 2e-7):
        ways = tuple(msgspec.structs.replace(way, effort=effort) for way in survey.paths)
        cluster = cluster_of(msgspec.structs.replace(survey, paths=ways), SPEC)
        timeline = PlacedPlan(SPEC, plan, facts, cluster, (0, 1, 2)).predict().timeline
        assert timeline is not None
        found.append(sum(span.stop - span.start for span in timeline.spans[stage]))
    none, some, more = found
    passes = 2 * facts.global_batch_size  # each forward and back
    assert some - none == pytest.approx(share * passes * 1e-7 * 32 * SPEC.hidden_size * 4)
    assert more - none == pytest.approx(2 * (some - none))


def test_nodes_of_one_machine_share_its_memory() -> None:
    nodes = serving_node("a", "box"), serving_node("b", "box"), serving_node("c")
    assert [device.memory for device in cluster_of(survey_of("serve", *nodes), SPEC).devices] == [2**31, 2**31, 2**32]


@pytest.mark.parametrize(
    ("hosts", "cores", "busy", "spare"),
    [
        (["a", "b"], 2, 1.0, True),
        (["a", "b"], 1, 1.0, False),
        (["a", "a"], 2, 1.0, False),
        (["a", "a"], 4, 1.0, True),
        (["a", "b"], 2, 0.8, False),
    ],
)
def test_who_sends_while_it_computes(hosts: list[str], cores: int, busy: float, spare: bool) -> None:
    """A processor is left over, or sums of gradients wait until passes are done: then a step takes longer."""
    nodes = [
        msgspec.structs.replace(training_node(host), host_name=host, cores=cores, busy=busy, node=str(number))
        for number, host in enumerate(hosts)
    ]
    cluster = cluster_of(survey_of("train", *nodes), SPEC)
    assert [device.has_spare_core for device in cluster.devices] == [spare] * 2
    placed = PlacedPlan(SPEC, Plan.parse("dp=2", SPEC.num_layers), TrainingFacts(32, 4, 2), cluster, (0, 1))
    free = replace(cluster, devices=tuple(replace(device, has_spare_core=True) for device in cluster.devices))
    slower = placed.predict().seconds - replace(placed, cluster=free).predict().seconds
    assert slower == 0 if spare else slower > 0


def test_a_survey_is_kept_and_known_again(tmp_path: Path) -> None:
    survey, path = survey_of("serve", serving_node("a"), serving_node("b")), tmp_path / "kept" / "survey.json"
    assert read_survey(path) is None
    survey.save(path)
    assert read_survey(path) == survey
    machines = [("a", 2, ""), ("b", 2, "")]
    assert survey.is_of(SPEC, "serve", "float32", machines)
    assert not survey.is_of(SPEC, "train", "float32", machines)
    assert not survey.is_of(SPEC, "serve", "bfloat16", machines)
    assert not survey.is_of(spec_of(5), "serve", "float32", machines)
    assert not survey.is_of(SPEC, "serve", "float32", machines[::-1])
    assert not survey.is_of(SPEC, "serve", "float32", [("a", 2, ""), ("b", 4, "")])
    assert not survey.is_of(SPEC, "serve", "float32", [("a", 2, ""), ("b", 2, "cuda:0 Some GPU")])


@pytest.mark.parametrize(
    ("hop_bandwidth", "device", "in_memory"), [(0.0, "", False), (1e8, "", True), (1e8, "cuda", False)]
)
def test_sums_that_did_not_go_over_links_went_through_memory_or_over_devices(
    hop_bandwidth: float, device: str, in_memory: bool
) -> None:
    """Ranks that are only some of a stage, as a grid's rows and columns, use devices together and no memory."""
    nodes = [msgspec.structs.replace(serving_node(name, "one"), device=device) for name in ("a", "b")]
    survey = survey_of("serve", *nodes)
    ways = tuple(msgspec.structs.replace(way, bandwidth=1e10, hop_bandwidth=hop_bandwidth) for way in survey.paths)
    cluster = cluster_of(msgspec.structs.replace(survey, paths=ways), SPEC)
    assert cluster.slowest_link((0, 1)).bandwidth == 1e10
    assert cluster.slowest_link((0, 1), in_memory=False).bandwidth == (1e8 if in_memory else 1e10)


def test_nodes_share_the_memory_of_their_machine_and_of_no_device_but_their_own() -> None:
    """Two on the processors of a box, two on one of its devices and one on another."""
    names = ("", "", "cuda:0 Some GPU", "cuda:0 Some GPU", "cuda:1 Some GPU")
    nodes = [msgspec.structs.replace(serving_node(str(i), host="box"), device=name) for i, name in enumerate(names)]
    devices = cluster_of(survey_of("serve", *nodes), SPEC).devices
    assert [2**32 // one.memory for one in devices] == [2, 2, 2, 2, 1]
    assert [one.has_spare_core for one in devices] == [False, False, False, False, True], "of two cores"


@pytest.mark.parametrize(
    "change", [{"more": 1}, {"version": 2}, {"nodes": []}, {"goal": "rest"}, {"ways": [[0, 1, 0.0, -1.0]]}]
)
def test_a_file_that_is_no_survey_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "survey.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(survey_of("serve", serving_node("a"))), **change}))
    with pytest.raises(ConfigError, match="is not a survey"):
        read_survey(path)


@pytest.mark.parametrize("plan", ["pp=1", "pp=2", "dp=2", "tp=2"])
@pytest.mark.parametrize("wrong", [0.5, 1.7])
def test_the_second_prediction_is_what_was_measured(plan: str, wrong: float) -> None:
    """The machines are in truth slower, or faster, than was measured; links are as they were."""
    survey = survey_of("train", training_node("a"), training_node("b", 0.6))
    parsed, facts = Plan.parse(plan, SPEC.num_layers), TrainingFacts(32, 8, 2)

    def predict(survey: Survey) -> float:
        cluster = cluster_of(survey, SPEC)
        return PlacedPlan(SPEC, parsed, facts, cluster, tuple(range(parsed.world_size))).predict().seconds

    measured = predict(survey.slower(wrong))
    corrected, factor = refitted(survey, predict, measured)
    assert factor == pytest.approx(wrong, rel=1e-4)
    assert predict(corrected) == pytest.approx(measured, rel=1e-4)
    assert abs(predict(survey) / measured - 1) > 0.1, "else there was nothing to correct"


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    numbers = StepNumbers(seconds=1.0, tokens_per_second=10.0, mfu=0.5)
    outcome = TrainingOutcome(plan="pp=1", microbatch_size=2, steps=5, predicted=numbers, measured=numbers)
    path = tmp_path / "prediction.json"
    save_outcome(outcome, path)
    assert msgspec.json.decode(path.read_bytes(), type=Outcome) == outcome


def test_the_first_steps_do_not_count() -> None:
    assert median([100.0, 50.0, 1.0, 2.0, 3.0]) == 2.0
    assert median([7.0]) == 7.0, "there are no others"
    assert median([1.0, 1.0, None, 2.0]) is None


@pytest.mark.parametrize(("head", "product"), [(4.0, 0.0), (4.0, 0.5), (0.5, 8.0)])
def test_no_step_reaches_more_than_the_peak(head: float, product: float) -> None:
    """Logits may be faster than layers, and a product measured in a busy moment slower than both. `head` and `product`
    are their rates beside that of layers."""
    node = training_node("a")
    logits = tuple(msgspec.structs.replace(one, seconds=one.seconds * HEAD_RATE / (head * RATE)) for one in node.logits)
    node = msgspec.structs.replace(node, logits=logits, peak=product * RATE)
    cluster = cluster_of(survey_of("train", node), SPEC)
    assert cluster.devices[0].peak("float32") == pytest.approx(max(1, head, product) * RATE)
    shared = TrainingFacts(576, 32, 8, shared_prompts=SharedPrompts(512, 64, 8))
    for facts in (
        TrainingFacts(32, 4),
        shared,
        replace(shared, target_tokens=64),
        TrainingFacts(32, 4, target_tokens=2),
    ):
        placed = PlacedPlan(SPEC, Plan.parse("pp=1", SPEC.num_layers), facts, cluster, (0,))
        assert 0 < placed.mfu(placed.predict().seconds) <= 1
    slower = cluster_of(survey_of("train", node.slower(2)), SPEC)
    assert slower.devices[0].peak("float32") == pytest.approx(max(1, head, product) * RATE / 2)


def test_a_node_beside_other_programs() -> None:
    node = training_node("a")
    assert not node.is_beside_others
    busy = msgspec.structs.replace(node, threads=2, busy=1.4)
    assert busy.is_beside_others
    assert not msgspec.structs.replace(busy, device="Some GPU").is_beside_others


def test_a_link_that_became_faster_brings_no_message_before_it_is_sent() -> None:
    """What two ranks gain of the latency was measured when that was longer."""
    survey = survey_of("train", training_node("a"), training_node("b"))
    paths = tuple(msgspec.structs.replace(path, meeting=-0.8 * path.latency) for path in survey.paths)
    faster = msgspec.structs.replace(survey, paths=tuple(path.slower(0.5) for path in paths))
    link = cluster_of(faster, SPEC).link(0, 1)
    assert (link.latency, link.sync_overhead) == (0.5e-4, -0.5e-4)
