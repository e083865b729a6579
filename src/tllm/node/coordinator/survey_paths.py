"""Combines what two nodes measured of the network paths between them into what a survey says of these."""

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


def paths_with_sums(
    spec: ModelSpec, settings: SurveySettings, nodes: Nodes, paths: Sequence[SurveyedPath], sums: Sequence[Met]
) -> list[SurveyedPath]:
    """The two paths with what sums over both measured: data goes both ways at once, as it does when ranks sum, or pass
    rows forward and gradients back.

    `sums` are the measurements of each end. Their means are taken: the two ends do not begin and end at the same time,
    and where one measures too little the other measures too much. Sums by memory or NCCL say nothing of what a
    pipeline hands on, which goes by links: for that the paths' own bandwidths stay.
    """
    turn, alone = min(one.turn for one in sums), min(one.sum for one in sums)
    works = sums[0].work, sums[1].work
    rate, brief = fmean(one.rate for one in sums), fmean(one.brief for one in sums)
    both = [
        msgspec.structs.replace(
            path,
            meeting=measured_sync_overhead(turn, works, path.latency + SHORT_BYTES / rate, alone),
            bandwidth=rate,
            brief=brief,
            effort=one.effort,
            hop_bandwidth=0.0 if one.by_links else path.bandwidth,
        )
        for path, one in zip(paths, sums, strict=True)
    ]
    shared = _lost_in_layer(spec, settings, nodes, both, [one.shared for one in sums if one.shared is not None])
    hops = [_lost_in_hop(spec, settings, place, nodes, both, one.ring) for place, one in enumerate(sums)]
    return [msgspec.structs.replace(path, shared=shared, hop=hop) for path, hop in zip(both, hops, strict=True)]


def _lost_in_hop(
    spec: ModelSpec,
    settings: SurveySettings,
    driver: int,
    nodes: Nodes,
    ways: Sequence[SurveyedPath],
    turn: float | None,
) -> float | None:
    """Seconds that each of two nodes loses in a token's turn round a pipeline that one of them drives: what neither
    their steps nor their messages explain. None where that was not measured."""
    if turn is None:
        return None
    sizes = spec.hidden_size * ITEM_BYTES[settings.dtype], TOKEN_ID
    way, back = ways[driver], ways[1 - driver]
    links = (link_speed(one).for_hops for one in (way, back))
    there, here = (transfer_time(size, link).seconds for size, link in zip(sizes, links, strict=True))
    return (turn - nodes[driver].driver_step - nodes[1 - driver].follower_step - there - here) / 2


def _lost_in_layer(
    spec: ModelSpec, settings: SurveySettings, nodes: Nodes, ways: Sequence[SurveyedPath], layer: Sequence[float]
) -> float | None:
    """Seconds lost in each sum of a layer that two nodes compute together: what halves of the layer and messages do not
    explain of the seconds that either node measured (`layer`).

    It is negative where these explain too much, as the halves were measured at another moment. None where it was not
    measured.
    """
    one, other = (node.half_layer for node in nodes)
    if not layer or one is None or other is None:
        return None
    sums, size = all_reduces_per_layer(spec), spec.hidden_size * ITEM_BYTES[settings.dtype]
    there, sending = (
        max(transfer_time(size, link_speed(way)).seconds for way in ways),
        size * max(way.effort for way in ways),
    )
    return unexplained_seconds(fmean(layer) / sums, (one / sums, other / sums), there, sending)
