"""`ClusterState`: what the coordinator knows, changed only by `apply(state, event)`, which is pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from tllm.cluster.messages import Heartbeat, Loaded, NodeFacts, Prepared, Progress
from tllm.spec.plan import Plan

Phase = Literal["joined", "assigned", "prepared", "loading", "loaded", "ready", "done", "broken", "lost"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node: what it said of itself, its rank in the plan of this epoch, and how far it is.

    `heard` is when its last heartbeat came, `stepped` when one last reported a new batch, both by time.monotonic().
    `before` is the rank that it had under a coordinator that has ended since.
    """

    facts: NodeFacts
    heard: float
    stepped: float = 0.0
    phase: Phase = "joined"
    rank: int | None = None
    before: int | None = None
    parameter_bytes: int = 0
    cache_bytes: int = 0
    progress: Progress = Progress(0, 0)
    loaded: Loaded | None = None
    beat: Heartbeat = Heartbeat()
    reason: str = ""

    @property
    def node(self) -> str:
        return self.facts.node

    @property
    def is_living(self) -> bool:
        return self.phase != "lost"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """All members in the order in which they joined, and the plan of the latest epoch. Epoch 0: no plan yet."""

    cluster: str
    epoch: int = 0
    plan: Plan | None = None
    members: tuple[Member, ...] = ()

    @property
    def living(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.is_living)

    @property
    def ranks(self) -> tuple[Member, ...]:
        """Members with a rank, in order, lost ones too. Ranks beyond the plan's compute nothing: they
        only hold snapshots of training steps that the others read."""
        return tuple(sorted((m for m in self.members if m.rank is not None), key=lambda m: m.rank or 0))

    @property
    def seated(self) -> tuple[Member, ...]:
        """Those that have a rank of the plan."""
        return self.ranks[: self.plan.world_size] if self.plan is not None else ()

    @property
    def is_ready(self) -> bool:
        """Whether every rank of the plan runs, or has run to its end."""
        seated = self.seated
        return (
            self.plan is not None
            and len(seated) == self.plan.world_size
            and all(member.phase in ("ready", "done") for member in seated)
        )

    @property
    def is_done(self) -> bool:
        """Whether every rank's run has ended."""
        return bool(self.seated) and all(member.phase == "done" for member in self.seated)

    @property
    def lost(self) -> tuple[Member, ...]:
        """Lost nodes that have a part in the plan."""
        return tuple(member for member in self.ranks if not member.is_living)

    def member(self, node: str) -> Member | None:
        return next((member for member in self.members if member.node == node), None)


class Event(msgspec.Struct, frozen=True):
    """Something that happened to one node."""

    node: str


class NodeJoined(Event, frozen=True):
    """A node became a member; one of the same name that was lost before is forgotten.

    `epoch` and `rank` are the last that it had, perhaps under a coordinator that has ended since.
    """

    facts: NodeFacts
    at: float
    epoch: int = 0
    rank: int | None = None


class NodeHeard(Event, frozen=True):
    """A node's heartbeat came."""

    beat: Heartbeat
    at: float


class NodeLost(Event, frozen=True):
    """A node left, failed or fell silent."""

    reason: str


class RankPrepared(Event, frozen=True):
    """A node has built its part and connected its links."""

    prepared: Prepared


class RankLoading(Event, frozen=True):
    """A node has read some of its weights."""

    progress: Progress


class RankLoaded(Event, frozen=True):
    """A node has read its weights."""

    loaded: Loaded


class RankReady(Event, frozen=True):
    """A node runs its part."""


class RankBroken(Event, frozen=True):
    """A node computes no more, for a wire broke."""

    reason: str


class RankDone(Event, frozen=True):
    """A node's run has ended."""


class Planned(msgspec.Struct, frozen=True):
    """A plan was assigned, which begins a new epoch. `nodes` take its ranks in order; those beyond the plan's ranks
    only give what they have in memory.
    """

    plan: Plan
    nodes: tuple[str, ...]


def apply(state: ClusterState, event: Event | Planned) -> ClusterState:
    """The state after an event. What a node that is unknown or lost still says changes nothing."""
    if isinstance(event, Planned):
        return _plan(state, event)
    if isinstance(event, NodeJoined):
        others = tuple(member for member in state.members if member.node != event.node)
        new = Member(facts=event.facts, heard=event.at, before=event.rank)
        return _replace(state, epoch=max(state.epoch, event.epoch), members=(*others, new))
    member = state.member(event.node)
    if member is None or not member.is_living:
        return state
    changed = _change(member, event)
    return _replace(state, members=tuple(changed if m is member else m for m in state.members))


def _plan(state: ClusterState, event: Planned) -> ClusterState:
    assert len(event.nodes) >= event.plan.world_size, "a plan needs a node for each rank"
    ranks = {node: rank for rank, node in enumerate(event.nodes)}
    kept = [member for member in state.members if member.is_living]
    assert set(ranks) <= {member.node for member in kept}, "a plan is for living nodes"
    members = tuple(
        Member(
            facts=member.facts,
            heard=member.heard,
            phase="assigned" if member.node in ranks else "joined",
            rank=ranks.get(member.node),
            beat=member.beat,
        )
        for member in kept
    )
    return _replace(state, epoch=state.epoch + 1, plan=event.plan, members=members)


def _change(member: Member, event: Event) -> Member:
    match event:
        case NodeHeard():
            has_stepped = event.beat.stats.get("batches") != member.beat.stats.get("batches")
            stepped = event.at if has_stepped else member.stepped
            return msgspec.structs.replace(member, beat=event.beat, heard=max(member.heard, event.at), stepped=stepped)
        case NodeLost():
            return msgspec.structs.replace(member, phase="lost", reason=event.reason)
        case RankPrepared():
            sizes = event.prepared
            return msgspec.structs.replace(
                member, phase="prepared", parameter_bytes=sizes.parameter_bytes, cache_bytes=sizes.cache_bytes
            )
        case RankLoading():
            return msgspec.structs.replace(member, phase="loading", progress=event.progress)
        case RankLoaded():
            parameter_bytes = event.loaded.parameter_bytes or member.parameter_bytes
            return msgspec.structs.replace(member, phase="loaded", loaded=event.loaded, parameter_bytes=parameter_bytes)
        case RankReady():
            # A short run may have ended before the answer to its start is read.
            return member if member.phase == "done" else msgspec.structs.replace(member, phase="ready")
        case RankBroken():
            return msgspec.structs.replace(member, phase="broken", reason=event.reason)
        case RankDone():
            return msgspec.structs.replace(member, phase="done")
        case _:
            raise AssertionError(f"no rule for {type(event).__name__}")


def _replace(state: ClusterState, **changes: object) -> ClusterState:
    return msgspec.structs.replace(state, **changes)
