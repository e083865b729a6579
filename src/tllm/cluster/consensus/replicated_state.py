"""`ReplicatedState`: what another coordinator needs to go on. Only `apply_entry(state, entry)` changes it, and is pure.

The entries are what replicas agree on. Heartbeats and progress are not among them: a new coordinator hears those anew.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tllm.cluster.http_messages import ServedModel
from tllm.cluster.join_token import TokenRecord
from tllm.cluster.messages import Port
from tllm.cluster.settings import Settings
from tllm.core.errors import ClusterError, decoded
from tllm.hub.repository import Repository
from tllm.spec.lora.lora_config import ServedLoras
from tllm.spec.plan import Plan
from tllm.spec.request import KeptReply, Output, Request, StreamRecord

MEMBERS = 50_000
TOKENS = 10_000
Name = Annotated[str, Meta(max_length=255)]


class SigningKey(msgspec.Struct, frozen=True):
    """The authority that signs certificates: its certificate and its private key, PEM."""

    certificate: Annotated[bytes, Meta(max_length=16384)]
    key: Annotated[bytes, Meta(max_length=16384)]

    def __repr__(self) -> str:
        return "SigningKey()"  # which goes to no log


class ReplicatedWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes run: as `node.coordinator.workload.Workload` says, what is done about a lost node, and how many
    replicas of this state there are to be. `folder` is where the first machine has the model, `served` what nodes' HTTP
    servers serve, `adapters` what LoRA adapters are loaded, `reads` the files that whoever coordinates reads."""

    folder: str
    config: str
    plan: Plan
    settings: Settings
    load_seconds: float
    allow_mixed: bool
    prepare_seconds: float
    lost_after: float
    policy: Literal["replan", "wait"]
    replicas: int
    hub: Repository | None = None
    served: ServedModel | None = None
    adapters: ServedLoras | None = None
    reads: tuple[str, ...] = ()


class TrainedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How far a training run has come: the last step that was told, and the step of the last save, 0 if there is none.

    `written` is where the metrics of these steps are ("HOST:FOLDER"). `beginning` stands for what the run began with
    beside its job (`training.job.initial_model.digest_of`): a tokenizer that was trained for it, say.
    """

    step: int = 0
    saved: int = 0
    written: Annotated[str, Meta(max_length=8192)] = ""
    beginning: Annotated[str, Meta(max_length=64)] = ""


class ReplicatedState(msgspec.Struct, frozen=True, kw_only=True):
    """`term` and `coordinator`: since which term who coordinates, and where it listens for nodes. `ranks` are the nodes
    of the plan of `epoch`, in order. Members that are the coordinator's `own` processes end with it. `replies` may be
    taken up by their ids; the first to begin stands first. `trained` is None where nothing is trained, or no step has
    begun."""

    cluster: str = ""
    authority: SigningKey | None = None
    tokens: tuple[TokenRecord, ...] = ()
    work: ReplicatedWork | None = None
    epoch: int = 0
    plan: Plan | None = None
    ranks: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    term: int = 0
    coordinator: tuple[str, int] | None = None
    replies: dict[str, KeptReply] = msgspec.field(default_factory=dict)
    trained: TrainedSteps | None = None
    ended: str | None = None


class StateEntry(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all entries."""


class ClusterFounded(StateEntry, frozen=True):
    """A cluster begins, under this authority."""

    cluster: Name
    authority: SigningKey


class CoordinatorBegan(StateEntry, frozen=True):
    """The leader of a term coordinates, and listens for nodes there."""

    term: int
    host: Name
    port: Port


class TokensChanged(StateEntry, frozen=True):
    """These join tokens are open, and no others."""

    tokens: Annotated[tuple[TokenRecord, ...], Meta(max_length=TOKENS)]


class WorkChosen(StateEntry, frozen=True):
    """What the nodes are to run from now on."""

    work: ReplicatedWork


class MembersChanged(StateEntry, frozen=True):
    """These nodes are members, and no others. Those in `own` are processes of the coordinator, and end with it."""

    nodes: Annotated[tuple[Name, ...], Meta(max_length=MEMBERS)]
    own: Annotated[tuple[Name, ...], Meta(max_length=MEMBERS)] = ()


class EpochBegan(StateEntry, frozen=True):
    """An epoch is about to begin, with this plan, whose ranks these nodes take in order."""

    epoch: int
    plan: Plan
    nodes: Annotated[tuple[Name, ...], Meta(max_length=MEMBERS)]


class ReplyOpened(StateEntry, frozen=True):
    """A reply has begun that may be taken up."""

    record: StreamRecord
    requests: tuple[Request, ...]


class ReplyGrown(StateEntry, frozen=True):
    """A reply has got these outputs, the first of them at place `start`. Once it `is_over` no more come."""

    reply_id: str
    start: int
    outputs: tuple[Output, ...]
    is_over: bool = False
    error: str = ""


class ReplyForgotten(StateEntry, frozen=True):
    """A reply is kept no more."""

    reply_id: str


class StepsTrained(StateEntry, frozen=True):
    """A training run has come so far. One that says less than is known changes nothing."""

    trained: TrainedSteps


class ClusterEnded(StateEntry, frozen=True):
    """The cluster was ended, and nobody is to take over."""

    reason: str = ""


AnyEntry = (
    ClusterFounded
    | CoordinatorBegan
    | TokensChanged
    | WorkChosen
    | MembersChanged
    | EpochBegan
    | ReplyOpened
    | ReplyGrown
    | ReplyForgotten
    | StepsTrained
    | ClusterEnded
)

_entries = msgspec.msgpack.Decoder(AnyEntry)
_states = msgspec.msgpack.Decoder(ReplicatedState)
_encode = msgspec.msgpack.Encoder().encode


def apply_entry(state: ReplicatedState, entry: AnyEntry) -> ReplicatedState:
    """The state after an entry. One that comes twice, or late, changes nothing the second time."""
    match entry:
        case ClusterFounded():
            return _replace(state, cluster=entry.cluster, authority=entry.authority)
        case CoordinatorBegan():
            place = (entry.host, entry.port)
            return _replace(state, term=entry.term, coordinator=place) if entry.term > state.term else state
        case TokensChanged():
            return _replace(state, tokens=entry.tokens)
        case WorkChosen():
            return _replace(state, work=entry.work)
        case MembersChanged():
            return _replace(state, members=entry.nodes, own=entry.own)
        case EpochBegan():
            if entry.epoch <= state.epoch:
                return state
            return _replace(state, epoch=entry.epoch, plan=entry.plan, ranks=entry.nodes)
        case ReplyOpened():
            name, opened = entry.record.id, KeptReply(record=entry.record, requests=entry.requests)
            return _replace(state, replies={**state.replies, name: state.replies.get(name, opened)})
        case ReplyGrown():
            return _with_outputs(state, entry)
        case ReplyForgotten():
            left = {name: reply for name, reply in state.replies.items() if name != entry.reply_id}
            return _replace(state, replies=left)
        case StepsTrained():
            known = state.trained
            return (
                state
                if known is not None and _reached(entry.trained) < _reached(known)
                else _replace(state, trained=entry.trained)
            )
        case ClusterEnded():
            return _replace(state, ended=entry.reason)


def _with_outputs(state: ReplicatedState, entry: ReplyGrown) -> ReplicatedState:
    """Outputs of a reply, where they follow those that it has; what it has already is not added."""
    reply = state.replies.get(entry.reply_id)
    if reply is None or entry.start > len(reply.outputs):
        return state
    new = entry.outputs[len(reply.outputs) - entry.start :]
    over, error = reply.is_over or entry.is_over, reply.error or entry.error
    grown = msgspec.structs.replace(reply, outputs=(*reply.outputs, *new), is_over=over, error=error)
    return _replace(state, replies={**state.replies, entry.reply_id: grown})


def _reached(trained: TrainedSteps) -> tuple[int, int]:
    return trained.step, trained.saved


class ReplicatedMachine:
    """The state machine of a replica. ClusterError for bytes that are no entry, or no state."""

    def __init__(self) -> None:
        self.state = ReplicatedState()

    def apply(self, content: bytes) -> None:
        self.state = apply_entry(self.state, decoded(content, _entries, _unread(content), ClusterError))

    def snapshot(self) -> bytes:
        return _encode(self.state)

    def restore(self, data: bytes) -> None:
        self.state = decoded(data, _states, _unread(data), ClusterError) if data else ReplicatedState()


def encoded(entry: AnyEntry) -> bytes:
    """An entry as the log carries it."""
    return _encode(entry)


def _unread(data: bytes) -> str:
    return f"{len(data)} bytes of the replicated state cannot be read"


def _replace(state: ReplicatedState, **changes: object) -> ReplicatedState:
    return msgspec.structs.replace(state, **changes)
