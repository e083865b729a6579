"""How far nodes are from each other, for whoever can choose from whom to take bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tllm.planner.survey import Survey

Far = Callable[[str, str], float]
"""far(node, source): seconds in which some bytes come from the source; infinite where that is not known"""

SOME_BYTES = 1 << 20


def nowhere_near(node: str, source: str) -> float:
    """Where nothing is known, all are alike."""
    return math.inf


def far_by(machines: Mapping[str, str], survey: Survey | None) -> Far:
    """Nothing within a machine, of which `machines` has the name for each node; between two what was measured.

    A node that the survey does not have is as far as the nearest of its machine that it has.
    """
    ways: dict[tuple[str, str], float] = {}
    places = [machines.get(node.node, node.host_name) for node in survey.nodes] if survey is not None else []
    for way in survey.ways if survey is not None else ():
        pair, seconds = (places[way.target], places[way.source]), way.latency + SOME_BYTES / way.bandwidth
        ways[pair] = min(seconds, ways.get(pair, math.inf))

    def far(node: str, source: str) -> float:
        here, there = machines.get(node), machines.get(source)
        if here is None or there is None:
            return math.inf
        return 0.0 if here == there else ways.get((here, there), math.inf)

    return far
