"""From heartbeats to events: who has been silent for too long. The clock is passed in."""

from __future__ import annotations

import math
from collections import Counter

from tllm.cluster.state import ClusterState, NodeLost
from tllm.core.errors import ConfigError

BEAT_SECONDS = 0.5
FULL = 0.9  # of a machine's memory
LATE_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A node that was not heard for LATE_SECONDS is named as late; one not for SILENCE_SECONDS, or as asked, is lost."""


def check_lost_after(seconds: float) -> None:
    """ConfigError where a node would be lost before it is late: a few heartbeats may be held up on any machine."""
    if not LATE_SECONDS <= seconds < math.inf:
        raise ConfigError(
            f"a node cannot be given up after {seconds:g} s of silence: it beats every {BEAT_SECONDS:g} s, "
            f"and is late after {LATE_SECONDS:g} s",
            f"give --lost-after of {LATE_SECONDS:g} or more",
        )


def silent(state: ClusterState, now: float, limit: float) -> tuple[NodeLost, ...]:
    """The loss of every node that was not heard for more than `limit` seconds."""
    return tuple(
        NodeLost(member.node, f"{describe(state, member.node)} has been silent for {now - member.heard:.1f} s")
        for member in state.living
        if now - member.heard > limit
    )


def fullness(state: ClusterState, node: str) -> str:
    """What its last heartbeat said of its memory, if that was nearly full: the system may have killed it."""
    member = state.member(node)
    if member is None or member.beat.rss_bytes < FULL * member.facts.memory_bytes:
        return ""
    return f"; its process held {member.beat.rss_bytes} bytes of the machine's {member.facts.memory_bytes}"


def overfull(state: ClusterState) -> dict[str, str]:
    """In words, for each node that is given memory, that what it takes, with those that share it, is more."""
    given = [member for member in state.living if member.facts.is_given]
    held = Counter[tuple[str, int]]()
    for member in given:
        held[member.facts.room] += member.beat.rss_bytes
    return {
        member.node: f"{describe(state, member.node)} holds {member.beat.rss_bytes} bytes of memory"
        + (f", all nodes there {held[room]}," if held[room] > member.beat.rss_bytes else "")
        + f" and was given {room[1]}"
        for member in given
        if held[room := member.facts.room] > room[1]
    }


def holder(state: ClusterState) -> str:
    """The node that work under way waits for, by the batches that the stages have begun; "" if nothing is known.

    Stages that have begun the fewest wait for the one before them; where all have begun the same, the last is at work.
    """
    plan, ranks = state.plan, state.ranks
    if plan is None or len(ranks) < plan.world_size:
        return ""
    leaders = [ranks[plan.ranks(stage).start] for stage in range(plan.pp)]
    begun = [member.beat.stats.get("batches", 0.0) for member in leaders]
    ahead = [member.node for member, count in zip(leaders, begun, strict=True) if count > min(begun)]
    return ahead[-1] if ahead else leaders[-1].node


def describe(state: ClusterState, node: str) -> str:
    """A node in words, with the rank and layers that are its part."""
    member = state.member(node)
    if member is None or member.rank is None or state.plan is None:
        return f"node {node}"
    plan, rank = state.plan, member.rank
    if rank >= plan.world_size:
        return f"node {node} (no rank)"
    if rank >= plan.replicas * plan.replica_size:
        return f"node {node} (rank {rank}, a server)"
    runs = plan.runs[plan.coordinates(rank).stage :: plan.pp]
    layers = " and ".join(f"[{run.start}, {run.stop})" for run in runs)
    return f"node {node} (rank {rank}, layers {layers})"
