"""From heartbeats to events: who has been silent for too long. The clock is passed in."""

from __future__ import annotations

from tllm.cluster.state import ClusterState, NodeLost

BEAT_SECONDS = 0.5
LATE_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A node that was not heard for LATE_SECONDS is named as late; one not for SILENCE_SECONDS is lost."""


def silent(state: ClusterState, now: float, limit: float) -> tuple[NodeLost, ...]:
    """The loss of every node that was not heard for more than `limit` seconds."""
    return tuple(
        NodeLost(member.node, f"{describe(state, member.node)} has been silent for {now - member.heard:.1f} s")
        for member in state.living
        if now - member.heard > limit
    )


def describe(state: ClusterState, node: str) -> str:
    """A node in words, with the rank and layers that are its part."""
    member = state.member(node)
    if member is None or member.rank is None or state.plan is None:
        return f"node {node}"
    plan, rank = state.plan, member.rank
    if rank >= plan.replicas * plan.replica_size:
        return f"node {node} (rank {rank}, a server)"
    runs = plan.runs[plan.coordinates(rank).stage :: plan.pp]
    layers = " and ".join(f"[{run.start}, {run.stop})" for run in runs)
    return f"node {node} (rank {rank}, layers {layers})"
