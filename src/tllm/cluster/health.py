"""From heartbeats to events: who has been silent for too long. The clock is passed in."""

from __future__ import annotations

from tllm.cluster.state import ClusterState, NodeLost

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0


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
    stage = state.plan.stages[state.plan.place(member.rank)[0]]
    return f"node {node} (rank {member.rank}, layers [{stage.start}, {stage.stop}))"
