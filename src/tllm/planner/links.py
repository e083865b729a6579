"""Seconds of what a group of ranks sends in a step, by the speed of its links."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tllm.ground.errors import PlanError
from tllm.planner.simulate import LinkSpeed


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
