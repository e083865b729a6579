"""The way between two nodes, of what either found when they met."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.unit.node.coordinator.test_survey import SETTINGS
from tests.unit.planner.measured.test_survey import KEYS, SPEC, serving_node
from tllm.node.coordinator.survey_paths import paths_with_sums
from tllm.node.roles.sum_latency import Met
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts
from tllm.planner.cost.stage_team import StageTeam
from tllm.planner.measured.survey import (
    Survey,
    SurveyedNode,
    SurveyedPass,
    SurveyedPath,
    cluster_of,
    digest,
    link_speed,
)
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.cut import cut_stage
from tllm.spec.plan import Plan

MET = Met(work=2e-3, sum=2e-3, turn=6e-3, rate=1.5e7, effort=1e-9, brief=3e7)
WAYS = SurveyedPath(0, 1, 1e-3, 1e7), SurveyedPath(1, 0, 1e-3, 2e7)
BOTH = serving_node("a"), serving_node("b", speed=0.5)


def met(*shared: float | None, nodes: tuple[SurveyedNode, SurveyedNode] = BOTH) -> list[SurveyedPath]:
    """The ways of two nodes that saw a layer which both serve take so long."""
    return paths_with_sums(SPEC, SETTINGS, nodes, WAYS, [msgspec.structs.replace(MET, shared=one) for one in shared])


def team(ways: Sequence[SurveyedPath]) -> StageTeam:
    """Both nodes, which share layers."""
    survey = Survey(model=digest(SPEC), goal="serve", dtype="float32", nodes=BOTH, paths=tuple(ways))
    return StageTeam(SPEC, cluster_of(survey, SPEC), (0, 1), cut_stage(SPEC, (1, 1)), ServingFacts("float32", KEYS, 1))


def test_what_was_measured_both_ways_counts_for_either() -> None:
    for way in met(None, None):
        assert (way.bandwidth, way.brief, way.effort, way.shared) == (1.5e7, 3e7, 1e-9, None)


@pytest.mark.parametrize("layer", [2.5e-3, 20e-3, 50e-3])
def test_a_layer_that_both_serve_is_predicted_to_take_what_it_took(layer: float) -> None:
    """Whatever its halves and messages say, which are of other moments, and of warm caches: more, or less."""
    ways = met(layer, layer)
    assert all(way.shared is not None and (way.shared < 0) == (layer == 2.5e-3) for way in ways)
    assert team(ways).layer_time(SPEC.layers[0], ExpectedBatch(1, 1, KEYS, 1)).seconds == pytest.approx(layer)


def test_no_message_comes_before_it_is_sent() -> None:
    link = team(met(1e-6, 1e-6)).link
    assert link.sync_overhead == -link.latency


@pytest.mark.parametrize("turns", [(9e-3, 9e-3), (9e-3, 7e-3), (4e-3, 5e-3)])
def test_a_turn_round_a_ring_of_both_is_predicted_to_take_what_it_took(turns: tuple[float, float]) -> None:
    """Beside layers and logits, whatever steps and messages alone say; on an average of either being the driver."""
    nodes = tuple(
        msgspec.structs.replace(node, turns=(SurveyedPass(1, 1, 1, 1e-3),), follows=(SurveyedPass(1, 1, 1, 2e-4),))
        for node in BOTH
    )
    found = [msgspec.structs.replace(MET, ring=turn) for turn in turns]
    ways = tuple(paths_with_sums(SPEC, SETTINGS, (nodes[0], nodes[1]), WAYS, found))
    cluster = cluster_of(Survey(model=digest(SPEC), goal="serve", dtype="float32", nodes=nodes, paths=ways), SPEC)
    predicted = predict_serving(SPEC, Plan.parse("pp=2", SPEC.num_layers), cluster, (0, 1), ServingFacts("float32"))
    computed = sum(stage.decode.seconds for stage in predicted.stages) - 1e-3 - 2e-4
    assert predicted.per_token - computed == pytest.approx(sum(turns) / 2)


def test_without_a_ring_hops_lose_what_meetings_do() -> None:
    for way in met(None, None):
        assert way.hop is None and link_speed(way).for_hops == link_speed(way)


def test_hops_go_by_links_where_sums_do_not() -> None:
    """A prompt's batch takes what it takes over the paths; only what is summed has the memory's rate."""
    found = [msgspec.structs.replace(MET, rate=5e9, brief=9e9, ring=9e-3, by_links=False)] * 2
    ways = tuple(paths_with_sums(SPEC, SETTINGS, BOTH, WAYS, found))
    assert [(way.bandwidth, way.brief, way.hop_bandwidth) for way in ways] == [(5e9, 9e9, 1e7), (5e9, 9e9, 2e7)]
    facts = ServingFacts("float32", prompt=2048)
    cluster = cluster_of(Survey(model=digest(SPEC), goal="serve", dtype="float32", nodes=BOTH, paths=ways), SPEC)
    predicted = predict_serving(SPEC, Plan.parse("pp=2", SPEC.num_layers), cluster, (0, 1), facts)
    nbytes = predicted.load.prefill.tokens * SPEC.hidden_size * 4
    assert predicted.stages[0].prefill_hop.sending == pytest.approx(nbytes / 1e7)
    # The seconds lost in a turn are those that its messages over links do not explain.
    there, back = SPEC.hidden_size * 4 / 1e7 + 1e-3, 8 / 2e7 + 1e-3
    steps = BOTH[0].driver_step + BOTH[1].follower_step
    assert ways[0].hop == pytest.approx((9e-3 - steps - there - back) / 2, rel=1e-12)


def test_without_halves_nothing_is_known_of_a_layer() -> None:
    whole = tuple(
        msgspec.structs.replace(node, layers=tuple(one for one in node.layers if one.ranks == 1)) for node in BOTH
    )
    assert met(20e-3, 20e-3, nodes=(whole[0], whole[1]))[0].shared is None
