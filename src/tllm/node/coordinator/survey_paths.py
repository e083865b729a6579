"""What two nodes measured of the way between them and back, as a survey has it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from tllm.cluster.settings import SurveySettings
from tllm.node.roles.sum_latency import SHORT_BYTES, Met
from tllm.planner.cost.message_time import measured_sync_overhead, transfer_time, unexplained_seconds
from tllm.planner.cost.rank_bytes import ITEM_BYTES
from tllm.planner.cost.stage_team import TOKEN_ID, all_reduces_per_layer
from tllm.planner.measured.survey import SurveyedNode, SurveyedPath, link_speed
from tllm.spec.model_spec import ModelSpec

Nodes = tuple[SurveyedNode, SurveyedNode]


def met_ways(
    spec: ModelSpec, settings: SurveySettings, nodes: Nodes, ways: Sequence[SurveyedPath], met: Sequence[Met]
) -> list[SurveyedPath]:
    """The ways as sums find them: both at once, as ranks send that sum, or pass rows there and gradients back.

    Neither begins or ends when the other does: what one finds too fast the other finds too slow.
    """
    turn, alone = min(one.turn for one in met), min(one.sum for one in met)
    works = met[0].work, met[1].work
    rate, brief = fmean(one.rate for one in met), fmean(one.brief for one in met)
    found = [
        msgspec.structs.replace(
            way,
            meeting=measured_sync_overhead(turn, works, way.latency + SHORT_BYTES / rate, alone),
            bandwidth=rate,
            brief=brief,
            effort=one.effort,
        )
        for way, one in zip(ways, met, strict=True)
    ]
    shared = _lost_in_layer(spec, settings, nodes, found, [one.shared for one in met if one.shared is not None])
    hops = [_lost_in_hop(spec, settings, place, nodes, found, one.ring) for place, one in enumerate(met)]
    return [msgspec.structs.replace(way, shared=shared, hop=hop) for way, hop in zip(found, hops, strict=True)]


def _lost_in_hop(
    spec: ModelSpec,
    settings: SurveySettings,
    driver: int,
    nodes: Nodes,
    ways: Sequence[SurveyedPath],
    turn: float | None,
) -> float | None:
    """What is lost, by each of both, in a turn round a ring that one of two nodes drives: what neither's step nor
    messages explain. None where that was not measured."""
    if turn is None:
        return None
    sizes = spec.hidden_size * ITEM_BYTES[settings.dtype], TOKEN_ID
    way, back = ways[driver], ways[1 - driver]
    there, here = (transfer_time(size, link_speed(one)).seconds for size, one in zip(sizes, (way, back), strict=True))
    return (turn - nodes[driver].driver_step - nodes[1 - driver].follower_step - there - here) / 2


def _lost_in_layer(
    spec: ModelSpec, settings: SurveySettings, nodes: Nodes, ways: Sequence[SurveyedPath], layer: Sequence[float]
) -> float | None:
    """What is lost in each sum of a layer that two nodes serve in so many seconds, as either saw them: what halves of
    it and messages do not explain. Less than nothing where these explain too much, as halves were measured at another
    moment. None where that was not measured."""
    one, other = (node.half_layer for node in nodes)
    if not layer or one is None or other is None:
        return None
    sums, size = all_reduces_per_layer(spec), spec.hidden_size * ITEM_BYTES[settings.dtype]
    there, sending = (
        max(transfer_time(size, link_speed(way)).seconds for way in ways),
        size * max(way.effort for way in ways),
    )
    return unexplained_seconds(fmean(layer) / sums, (one / sums, other / sums), there, sending)
