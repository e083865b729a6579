"""What heartbeats say of nodes: who has been silent for too long or takes too much memory, and whom all wait for.

The functions are pure; the time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter

from tllm.cluster.state import ClusterState, Member, NodeLost
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.spec.process_groups import server_ranks

BEAT_SECONDS = 0.5
"""The time from one heartbeat to the next."""

LATE_SECONDS = 2.0
"""A node that has sent no heartbeat for so long is named as late."""

SILENCE_SECONDS = 5.0
"""A node that has sent no heartbeat for so long is lost, unless another limit was asked for."""

NODES_AT_ONCE = 2000
"""Up to so many nodes beat every BEAT_SECONDS; with more of them each beats less often, so that the coordinator, which
is one thread, reads and sends 4,000 heartbeats a second at the most."""

LATE_BEATS, SILENT_BEATS, ASKED_BEATS = 3, 4, 2
"""A node is never late or lost before so many of its heartbeats are missing. After the last number its machine is
asked, and the node is lost where nothing answers."""

FULL = 0.9
"""The part of a machine's memory at which it counts as nearly full."""


def check_lost_after(seconds: float) -> None:
    """ConfigError where a node would be lost before it is late: a few heartbeats may be held up on any machine."""
    if not LATE_SECONDS <= seconds < math.inf:
        raise ConfigError(
            f"a node cannot be given up after {seconds:g} s of silence: it beats every {BEAT_SECONDS:g} s, "
            f"and is late after {LATE_SECONDS:g} s",
            f"give --lost-after of {LATE_SECONDS:g} or more",
        )


class HeartbeatInterval:
    """How often each node of a cluster is to beat, and after what silence it is late, or lost.

    `lost_after` was asked for. `expected` nodes are to come. `beats` is by how much the interval is longer than
    BEAT_SECONDS; it never shrinks, since nodes that are here were told of it.
    """

    def __init__(self, lost_after: float = SILENCE_SECONDS) -> None:
        self.beats = 1
        self.expected = 0
        self._lost_after = lost_after

    def grow(self, nodes: int) -> None:
        """So many nodes are here."""
        self.beats = max(self.beats, -(-max(nodes, self.expected) // NODES_AT_ONCE))

    @property
    def seconds(self) -> float:
        """From one heartbeat of a node to the next."""
        return self.beats * BEAT_SECONDS

    @property
    def late_after(self) -> float:
        """Seconds of silence after which a node is named as late."""
        return max(LATE_SECONDS, LATE_BEATS * self.seconds)

    @property
    def asked_after(self) -> float:
        """Seconds of silence after which its machine is asked, and the node is lost where that does not answer."""
        return max(self._lost_after, ASKED_BEATS * self.seconds)

    @property
    def lost_after(self) -> float:
        """Seconds of silence after which it is lost though its machine answers."""
        return max(self._lost_after, SILENT_BEATS * self.seconds)


def silent(state: ClusterState, now: float, limit: float) -> tuple[NodeLost, ...]:
    """The loss of every node that has sent no heartbeat for more than `limit` seconds."""
    return tuple(
        NodeLost(member.node, f"{describe(state, member.node)} has been silent for {now - member.heard:.1f} s")
        for member in state.living
        if now - member.heard > limit
    )


def fullness(state: ClusterState, node: str) -> str:
    """What a node's last heartbeat said of its memory if that was nearly full: the system may then have killed it."""
    member = state.member(node)
    if member is None or _held(member) < FULL * member.facts.memory_bytes:
        return ""
    return f"; its process held {_held(member)} bytes of the machine's {member.facts.memory_bytes}"


def overfull(state: ClusterState) -> dict[str, str]:
    """A warning for each node that takes more memory, with those that share it, than it was given; by node."""
    given = [member for member in state.living if member.facts.is_given]
    held = Counter[tuple[str, int]]()
    for member in given:
        held[member.facts.room] += _held(member)
    return {
        member.node: f"{describe(state, member.node)} holds {_held(member)} bytes of memory"
        + (f", all nodes there {held[room]}," if held[room] > _held(member) else "")
        + f" and was given {room[1]}"
        for member in given
        if held[room := member.facts.room] > room[1]
    }


def _held(member: Member) -> int:
    """Bytes that a node holds of those that plans count."""
    return max(0, member.beat.rss_bytes - member.facts.uncounted_bytes)


def holder(state: ClusterState) -> str:
    """The node that the batches under way wait for, as far as the counts of begun batches tell; "" if nothing is known.

    Stages that have begun the fewest batches wait for the stage before them. If all have begun the same number, the
    last stage is at work.
    """
    plan, ranks = state.plan, state.ranks
    if plan is None or len(ranks) < plan.world_size:
        return ""
    leaders = [ranks[plan.ranks(stage).start] for stage in range(plan.pp)]
    begun = [member.beat.stats.get("batches", 0.0) for member in leaders]
    ahead = [member.node for member, count in zip(leaders, begun, strict=True) if count > min(begun)]
    return ahead[-1] if ahead else leaders[-1].node


def describe(state: ClusterState, node: str) -> str:
    """A node in words, with its rank and layers."""
    member = state.member(node)
    if member is None or member.rank is None or state.plan is None:
        return f"node {node}"
    return f"node {node} ({describe_rank(state.plan, member.rank)})"


def describe_rank(plan: Plan, rank: int) -> str:
    """A rank in words, with its layers."""
    if rank >= plan.world_size:
        return "no rank"
    if rank in server_ranks(plan):
        return f"rank {rank}, a server"
    runs = plan.runs[plan.coordinates(rank).stage :: plan.pp]
    layers = " and ".join(f"[{run.start}, {run.stop})" for run in runs)
    return f"rank {rank}, layers {layers}"
