"""Seconds of what a group of ranks sends in a step, by the speed of its links, and what it costs their computing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import LinkSpeed
from tllm.spec.plan import Plan


def speed_of(links: LinkSpeed | Mapping[str, LinkSpeed], group: str) -> LinkSpeed:
    """PlanError where the group's speed is not given."""
    if isinstance(links, LinkSpeed):
        return links
    if group not in links:
        raise PlanError(f"no speed is given for the links of {group}", f"given: {', '.join(sorted(links))}")
    return links[group]


def seconds_of(sent: float, speed: LinkSpeed, messages: int = 1) -> float:
    """Nothing, or the bytes one after another, and for each message the way to the other end and a meeting."""
    if not sent:
        return 0.0
    each = sent / messages if messages else math.inf
    return sent / speed.rate(each) + max(1, messages) * speed.latency + messages * speed.meeting


def computing_seconds(hops: LinkSpeed | Mapping[tuple[int, int], LinkSpeed], plan: Plan) -> list[float]:
    """Of each stage of a pipeline, seconds for a byte of the rows of an op, with its slowest link.

    A link's effort is for a byte taken and one sent: a half for each neighbour, of which a stage at an end has one.
    """
    is_ring, found = plan.chunks > 1, list[float]()
    for stage in range(plan.pp):
        links = [hops] if isinstance(hops, LinkSpeed) else [link for (here, _), link in hops.items() if here == stage]
        neighbours = (is_ring or stage > 0) + (is_ring or stage + 1 < plan.pp)
        found.append(neighbours / 2 * max((one.effort for one in links), default=0.0))
    return found
