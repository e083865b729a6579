"""`ClusterState`: what the coordinator knows, changed only by `apply(state, event)`, which is pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from tllm.cluster.messages import Heartbeat, Loaded, NodeFacts, Prepared, Progress, RoleTaken
from tllm.core.ordered_trie import OrderedTrie
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName

Phase = Literal["joined", "assigned", "prepared", "loading", "loaded", "ready", "done", "refused", "broken", "lost"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node: what it said of itself, its rank in the plan of this epoch, and how far it is.

    `heard` is when its last heartbeat came, `stepped` when one last reported a new batch, both by `Membership.now`.
    `before` is the rank that it had under a coordinator that has ended since. `peer`: the rank that it could not take
    its part for, if it could not, and this was between the two. `role`: what it does beside the plan, without a rank;
    it answers at the port `answers_at` once that is not 0, together with those of its `team`.
    """

    facts: NodeFacts
    heard: float
    stepped: float = 0.0
    phase: Phase = "joined"
    rank: int | None = None
    before: int | None = None
    role: RoleName | None = None
    answers_at: int = 0
    team: str = ""
    parameter_bytes: int = 0
    cache_bytes: int = 0
    progress: Progress = Progress(0, 0)
    loaded: Loaded | None = None
    beat: Heartbeat = Heartbeat()
    reason: str = ""
    peer: int | None = None

    @property
    def node(self) -> str:
        return self.facts.node

    @property
    def is_living(self) -> bool:
        return self.phase != "lost"


NOBODY = OrderedTrie[Member]()


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """All members in the order in which they joined, and the plan of the latest epoch. Epoch 0: no plan yet.

    Of n members, `apply`, `member` and all that is counted take O(log n) at most; each list takes O(n log n).

    living_count: members that are not lost. seated_count: those that have a rank of the plan, lost ones too.
    ready_count, done_count: of these, those that run or have run to their end; and the latter alone.
    returned_count: living members that had a rank under a coordinator that has ended since.
    """

    cluster: str
    epoch: int = 0
    plan: Plan | None = None
    table: OrderedTrie[Member] = NOBODY
    living_count: int = 0
    seated_count: int = 0
    ready_count: int = 0
    done_count: int = 0
    returned_count: int = 0

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self.table)

    @property
    def living(self) -> tuple[Member, ...]:
        return tuple(member for member in self.table if member.is_living)

    @property
    def available(self) -> tuple[Member, ...]:
        """Living members that may have a rank, as they have no role beside the plan."""
        return tuple(member for member in self.table if member.is_living and member.role is None)

    @property
    def ranks(self) -> tuple[Member, ...]:
        """Members with a rank, in order, lost ones too. Ranks beyond the plan's compute nothing: they
        only hold snapshots of training steps that the others read."""
        return tuple(sorted((m for m in self.table if m.rank is not None), key=lambda m: m.rank or 0))

    @property
    def seated(self) -> tuple[Member, ...]:
        """Those that have a rank of the plan."""
        return self.ranks[: self.seated_count]

    @property
    def is_ready(self) -> bool:
        """Whether every rank of the plan runs, or has run to its end."""
        return self.plan is not None and self.ready_count == self.plan.world_size

    @property
    def is_done(self) -> bool:
        """Whether every rank's run has ended."""
        return self.seated_count > 0 and self.done_count == self.seated_count

    @property
    def lost(self) -> tuple[Member, ...]:
        """Lost nodes that have a part in the plan."""
        return tuple(member for member in self.ranks if not member.is_living)

    def member(self, node: str) -> Member | None:
        return self.table.get(node)


class Event(msgspec.Struct, frozen=True):
    """Something that happened to one node."""

    node: str


class NodeJoined(Event, frozen=True):
    """A node became a member; one of the same name that was lost before is forgotten.

    `epoch` and `rank` are the last that it had, perhaps under a coordinator that has ended since; `role` is what it
    does beside any plan.
    """

    facts: NodeFacts
    at: float
    epoch: int = 0
    rank: int | None = None
    role: RoleTaken | None = None


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


class RankRefused(Event, frozen=True):
    """A node could not take its part, or not for what is between it and the rank `peer`."""

    reason: str
    peer: int | None = None


class RankBroken(Event, frozen=True):
    """A node computes no more, for a wire broke."""

    reason: str


class RankDone(Event, frozen=True):
    """A node's run has ended."""


class RoleGiven(Event, frozen=True):
    """A node is to have a role beside the plan, or None any more, and may then have a rank."""

    role: RoleName | None


class RoleBegan(Event, frozen=True):
    """A node answers in its role."""

    taken: RoleTaken


class Planned(msgspec.Struct, frozen=True):
    """A plan was assigned, which begins a new epoch. `nodes` take its ranks in order; those beyond the plan's ranks
    only give what they have in memory.
    """

    plan: Plan
    nodes: tuple[str, ...]


def by_machine(members: Iterable[Member]) -> list[Member]:
    """These members in their order, but those of one machine next to each other, where the first of them stands.

    Ranks that follow each other, as those of a tensor-parallel stage do, then share a machine as far as they can.
    """
    machines: dict[str, list[Member]] = {}
    for member in members:
        machines.setdefault(member.facts.host_name, []).append(member)
    return [member for machine in machines.values() for member in machine]


def apply(state: ClusterState, event: Event | Planned) -> ClusterState:
    """The state after an event. What a node that is unknown or lost still says changes nothing."""
    if isinstance(event, Planned):
        return _plan(state, event)
    if isinstance(event, NodeJoined):
        new = Member(facts=event.facts, heard=event.at, before=event.rank)
        if event.role is not None:
            role, port, team = event.role.role, event.role.port, event.role.team
            new = msgspec.structs.replace(new, phase="ready", role=role, answers_at=port, team=team)
        before, table = state.member(event.node), state.table.added(event.node, new)
        return _recounted(state, before, new, epoch=max(state.epoch, event.epoch), table=table)
    member = state.member(event.node)
    if member is None or not member.is_living:
        return state
    changed = _change(member, event)
    return _recounted(state, member, changed, table=state.table.replaced(event.node, changed))


def _plan(state: ClusterState, event: Planned) -> ClusterState:
    assert len(event.nodes) >= event.plan.world_size, "a plan needs a node for each rank"
    ranks = {node: rank for rank, node in enumerate(event.nodes)}
    kept = state.living
    assert set(ranks) <= {member.node for member in kept}, "a plan is for living nodes"
    members = (
        Member(
            facts=member.facts,
            heard=member.heard,
            phase="assigned" if member.node in ranks else member.phase if member.role else "joined",
            rank=ranks.get(member.node),
            role=member.role,
            answers_at=member.answers_at,
            team=member.team,
            beat=member.beat,
        )
        for member in kept
    )
    return ClusterState(
        cluster=state.cluster,
        epoch=state.epoch + 1,
        plan=event.plan,
        table=OrderedTrie.of((member.node, member) for member in members),
        living_count=len(kept),
        seated_count=event.plan.world_size,
    )


def _recounted(state: ClusterState, before: Member | None, after: Member, **changes: object) -> ClusterState:
    """The state with a member that is other than before, and these changes."""
    if before is not None and _counted(before) == _counted(after):
        return msgspec.structs.replace(state, **changes)
    old, new = _counts(state, before), _counts(state, after)
    changed = {name: getattr(state, name) - was + now for name, was, now in zip(COUNTS, old, new, strict=True)}
    return msgspec.structs.replace(state, **changed, **changes)


def _counted(member: Member) -> tuple[object, ...]:
    """What decides for which of the counts a member counts."""
    return member.phase, member.rank, member.before


COUNTS = ("living_count", "seated_count", "ready_count", "done_count", "returned_count")


def _counts(state: ClusterState, member: Member | None) -> tuple[bool, bool, bool, bool, bool]:
    """For which of `COUNTS` a member counts."""
    if member is None:
        return False, False, False, False, False
    has_returned = member.is_living and member.before is not None
    seated = state.plan is not None and member.rank is not None and member.rank < state.plan.world_size
    phase = member.phase
    return member.is_living, seated, seated and phase in ("ready", "done"), seated and phase == "done", has_returned


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
        case RankRefused():
            return msgspec.structs.replace(member, phase="refused", reason=event.reason, peer=event.peer)
        case RankBroken():
            return msgspec.structs.replace(member, phase="broken", reason=event.reason)
        case RankDone():
            return msgspec.structs.replace(member, phase="done")
        case RoleGiven():
            phase: Phase = "assigned" if event.role else "joined"
            given = msgspec.structs.replace(member, phase=phase, role=event.role, answers_at=0, team="", rank=None)
            return msgspec.structs.replace(given, before=None) if event.role else given  # it lends no memory any more
        case RoleBegan():
            return msgspec.structs.replace(member, phase="ready", answers_at=event.taken.port, team=event.taken.team)
        case _:
            raise AssertionError(f"no rule for {type(event).__name__}")
