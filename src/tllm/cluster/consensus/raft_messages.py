"""What replicas of the coordinator's state say to each other: the messages of Raft, in bounds.

Names follow Ongaro's thesis, "Consensus: Bridging Theory and Practice" (2014), figure 3.1 and section 9.6 (pre-vote).
An entry's content is opaque here; `replicated_state` says what it means. Each message says where its sender listens, as
a new replica must answer a leader before it has the entries that name it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tllm.cluster.messages import Message, Refused, ReplicaPlace

ENTRY_BYTES = 4 * 1024 * 1024
"""The longest content of one entry."""

STATE_BYTES = 32 * 1024 * 1024
"""The longest snapshot."""

BATCH_BYTES = 1024 * 1024
BATCH_ENTRIES = 256
"""One message carries so many entries at most, and stops after the first that makes it longer than so many bytes."""

REPLICAS = 9
"""The most that a configuration may have. More would only make each commit slower."""

CONSENSUS_BYTES = STATE_BYTES + 1024 * 1024
"""The longest message between replicas."""

Index = Annotated[int, Meta(ge=0, le=2**62)]
Configuration = Annotated[tuple[ReplicaPlace, ...], Meta(max_length=REPLICAS)]
"""The replicas that vote."""


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log: with a `configuration` it changes who votes, and has no content. One with neither marks the
    beginning of a leader's term."""

    term: Index
    content: Annotated[bytes, Meta(max_length=ENTRY_BYTES)] = b""
    configuration: Configuration | None = None


class LogSnapshot(msgspec.Struct, frozen=True):
    """The state after the entry `index`, which has this term, and who votes then."""

    index: Index
    term: Index
    configuration: Configuration
    data: Annotated[bytes, Meta(max_length=STATE_BYTES)]


class RequestVote(Message, frozen=True):
    """A candidate asks for a vote in `term`. `is_pre`: it only asks whether it would get one, and no term begins.

    `is_transfer`: the leader has handed over to it, so that nobody need wait until that leader is silent.
    """

    term: Index
    sender: ReplicaPlace
    last_index: Index
    last_term: Index
    is_pre: bool
    is_transfer: bool = False


class TimeoutNow(Message, frozen=True):
    """A leader that leads `term` no more asks its follower to stand at once (section 3.10)."""

    term: Index
    sender: ReplicaPlace


class Vote(Message, frozen=True):
    """The answer. If it is granted, `term` is that of the question, else that of the voter."""

    term: Index
    sender: ReplicaPlace
    granted: bool
    is_pre: bool


class AppendEntries(Message, frozen=True):
    """A leader's entries after `previous_index`, none where it only says that it is there.

    `sent` is the leader's clock, which the answer repeats: from its own clock alone the leader knows how long the
    others will vote for nobody else.
    """

    term: Index
    sender: ReplicaPlace
    sent: float
    previous_index: Index
    previous_term: Index
    entries: Annotated[tuple[LogEntry, ...], Meta(max_length=BATCH_ENTRIES)]
    commit: Index


class InstallSnapshot(Message, frozen=True):
    """A leader's state, for a replica that lacks entries which the leader has no more."""

    term: Index
    sender: ReplicaPlace
    sent: float
    snapshot: LogSnapshot


class Appended(Message, frozen=True):
    """The answer to both. With `success`, the follower's log is the leader's up to `match`. Without, entries are
    missing before those that came, and `match` is what the follower knows to be committed: up to there they agree."""

    term: Index
    sender: ReplicaPlace
    sent: float
    success: bool
    match: Index


class FindCoordinator(Message, frozen=True):
    """Any member of the cluster asks a replica who coordinates now. The answer is `CoordinatorFound`."""

    answers = ("CoordinatorFound",)


class CoordinatorFound(Message, frozen=True):
    """Where the coordinator of this term listens for nodes. "" and 0: nobody that this replica knows of. `replicas` are
    all that it knows: whoever asks may have heard of fewer before the coordinator was lost."""

    term: Index
    host: str = ""
    port: int = 0
    replicas: Configuration = ()

    @property
    def address(self) -> tuple[str, int] | None:
        """The host and the port."""
        return (self.host, self.port) if self.host else None


RaftMessage = RequestVote | TimeoutNow | Vote | AppendEntries | InstallSnapshot | Appended
ToReplica = RaftMessage | FindCoordinator
FromReplica = CoordinatorFound | Refused
