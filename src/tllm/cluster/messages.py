"""Every message of the control wire, as msgpack: frozen structs whose tag is their class's name.

A message with an unknown tag or an unknown field is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tllm.cluster.http_messages import FromHttpServer, ToHttpServer
from tllm.cluster.settings import Settings
from tllm.cluster.weight_messages import (
    AdapterFiles,
    ChunkBytes,
    FindPages,
    GetChunk,
    GetPage,
    HeldPiece,
    ListHubChunks,
    ListPages,
    ModelFileFacts,
    OfWeights,
    OpenChunkConnection,
    PageNames,
    PagesFound,
    ToWeights,
)
from tllm.cluster.wire_message import Message as Message
from tllm.hub.repository import Repository
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.spec.request import Output, Request, StageSpan

PROTOCOL = 21
"""Changes with any change to a message here. Both ends must speak the same; there is no guessing."""

GUEST_BYTES = 16 * 1024
"""The largest message to or from an end that has shown no certificate."""

MEMBER_BYTES = 64 * 1024 * 1024
"""The largest message of a member: log-probabilities of a very long prompt."""

Kind = Literal["run", "config", "model", "plan", "capacity", "cluster", "link", "auth", "weights", "nan", "request"]
"""Which of our errors it was, so that it can be raised again at the other end."""


Port = Annotated[int, Meta(gt=0, lt=65536)]
TeamName = Annotated[str, Meta(pattern=r"\A(.{1,80}/[0-9a-f]{8})?\Z")]


# --- from an end without a certificate, and the answers to it
class Hello(Message, frozen=True):
    """A guest asks which cluster this is."""

    protocol: int


class Welcome(Message, frozen=True):
    """The certificate (PEM) of the cluster's authority, to be held against a join token.

    With a `host`, who answers only knows where the coordinator listens: there.
    """

    protocol: int
    authority: bytes
    host: Annotated[str, Meta(max_length=255, pattern=r"\A[0-9A-Za-z._:%-]*\Z")] = ""
    port: int = 0


class Join(Message, frozen=True):
    """A guest that trusts this cluster asks for a certificate in the name `node`. `source` is its program's digest."""

    protocol: int
    version: str
    node: str
    secret: bytes
    request: bytes
    source: str


class Joined(Message, frozen=True):
    """The certificate (PEM) asked for."""

    certificate: bytes


class Refused(Message, frozen=True):
    """No, and why; the connection or the request ends with it. `peer`: the other rank, of a failure between two."""

    reason: str
    hint: str = ""
    kind: Kind = "run"
    peer: Annotated[int, Meta(ge=0)] | None = None


# --- what nodes say about themselves
class DeviceFacts(Message, frozen=True):
    """Something that computes, with memory of its own unless it is the processor."""

    name: str
    memory_bytes: int


class NodeFacts(Message, frozen=True, kw_only=True):
    """What a node is. `host` and `port` are the address of its data wire; `lends` is the port of its chunk server on
    the same host, 0 if it has none. `can_succeed`: its process can take the coordinator's place.

    `memory_bytes` is the machine's memory, or what the node was given of it if `is_given`; that of its device, where it
    has one in `devices`. `is_shared`: nodes of one machine that were given memory share that amount. `uncounted_bytes`
    are of its process at rest, files of a large build of torch, and in no plan.
    """

    node: str
    host_name: str
    memory_bytes: int
    cores: int
    host: str
    port: int
    lends: int = 0
    is_given: bool = False
    is_shared: bool = True
    uncounted_bytes: int = 0
    can_succeed: bool = False
    pid: int = 0
    devices: tuple[DeviceFacts, ...] = ()
    versions: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def device(self) -> str:
        """What it computes on, if that is not its machine's processors."""
        return self.devices[0].name if self.devices else ""

    @property
    def room(self) -> tuple[str, int]:
        """By what name its memory is accounted, the machine's, its device's or its own, and how many bytes that is."""
        if self.devices:
            return f"{self.host_name} {self.device}", self.memory_bytes
        return self.host_name if self.is_shared else self.node, self.memory_bytes


class ReplicaPlace(msgspec.Struct, frozen=True, array_like=True):
    """A replica of the coordinator's state, and where it listens.

    `id` is the name on its certificate, a slash, and what its process drew when it began: a process that begins anew is
    another replica, as it forgot whom it voted for.
    """

    id: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,62}/[0-9a-f]{16}$")]
    host: Annotated[str, Meta(max_length=255)]
    port: Port

    @property
    def node(self) -> str:
        """The name on its certificate."""
        return self.id.partition("/")[0]

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class RoleTaken(Message, frozen=True):
    """The node has this role, as one of its `team`, whose first answers at this port of its data wire; others: 0."""

    role: RoleName
    port: Annotated[int, Meta(ge=0, lt=65536)]
    team: TeamName = ""


class Attach(Message, frozen=True):
    """The first message of a member: what it is, and the last epoch and rank that it had, if this is not its first.

    `role` is what it does at the moment beside any plan.
    """

    protocol: int
    facts: NodeFacts
    epoch: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # the next one is told in frames' four bytes
    rank: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    role: RoleTaken | None = None


class Attached(Message, frozen=True):
    """The member is taken in; how often it must be heard, and after what silence either end gives the other up."""

    cluster: str
    beat_seconds: float
    silence_seconds: float


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent by both ends all the time. `links` counts payload bytes over each wire ("0>1"); `stats` are the engine's,
    and `spans` what a rank did of late for sequences that are traced.

    `rss_bytes` of memory are held by the process now, `peak_bytes` at the most so far.
    """

    rss_bytes: int = 0
    peak_bytes: int = 0
    links: dict[str, int] = msgspec.field(default_factory=dict)
    stats: dict[str, float] = msgspec.field(default_factory=dict)
    spans: tuple[StageSpan, ...] = ()


class Failure(Message, frozen=True, kw_only=True):
    """A node cannot go on, and ends. With an `epoch`: only its part in that one, and it waits for another part."""

    message: str
    hint: str = ""
    kind: Kind = "run"
    epoch: int | None = None


class ServeReplica(Message, frozen=True):
    """Asks a node that `can_succeed` to hold a replica of the coordinator's state. The answer is `ReplicaServes`.

    `election_seconds`: a replica that heard no leader for so long may stand for election (`RaftTiming`). A node refuses
    on which one of these `files` cannot be read, or the `folder` lacks this `model`, which others need of it.
    """

    answers = ("ReplicaServes",)

    election_seconds: Annotated[float, Meta(gt=0, le=3600)]
    files: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()
    folder: str = ""
    model: tuple[ModelFileFacts, ...] = ()


class ReplicaServes(Message, frozen=True):
    """The node's replica, which waits for the leader's entries."""

    place: ReplicaPlace


class Replicas(Message, frozen=True):
    """All replicas of the coordinator's state: where a node asks for another coordinator if this one is lost."""

    places: tuple[ReplicaPlace, ...]


# --- assigning each node its rank
class RankAddress(Message, frozen=True):
    """Where a rank lives: its node, the address of the node's data wire, and the port of its chunk server. Of a node
    with a role, where it answers."""

    node: str
    host: str
    port: int
    lends: int = 0


class RankAddresses(Message, frozen=True):
    """The addresses of an epoch's ranks, sent before its `Assign`: what has changed `since` an earlier epoch whose
    addresses the node was sent on this connection, or with 0 all of them (`rank_addresses.pack_addresses`)."""

    epoch: int
    since: int
    packed: bytes


class Assign(Message, frozen=True, kw_only=True):
    """A node's part in the plan of an epoch: build it and connect the wires. The answer is `Prepared`.

    It ends the part of the epoch before, whatever is under way; weights that both need are kept. `places` are those of
    the `RankAddresses` that came before it, where it has none itself. `config` is the model's config as JSON. `folder`
    and `files` say where the model may lie on this node too; there are no files where weights begin at random. Of a
    model on the `hub` each node fetches what it needs from there. Ranks that serve load their parts of the `adapters`
    too.
    """

    answers = ("Prepared",)

    cluster: str
    epoch: int
    rank: int
    plan: Plan
    places: tuple[RankAddress, ...]
    config: str
    settings: Settings
    folder: str
    files: tuple[ModelFileFacts, ...]
    hub: Repository | None = None
    adapters: tuple[AdapterFiles, ...] = ()


class Prepared(Message, frozen=True, kw_only=True):
    """The wires of the rank are up. If it is to serve: what it will read, for the check that each element is held once.

    Rank 0 also lists the tensors that the whole model needs, with their shapes in the files.
    """

    rank: int
    pieces: tuple[HeldPiece, ...] = ()
    needed: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    parameter_bytes: int = 0
    cache_bytes: int = 0


class Load(Message, frozen=True):
    """Read the weights, or the last save. The answer is a stream: `Progress`, then `Loaded`."""

    answers = ("Progress", "Loaded")

    epoch: int


class Progress(Message, frozen=True):
    """Bytes read so far, and in all."""

    done: int
    total: int


class Loaded(Message, frozen=True, kw_only=True):
    """The weights are in place. `fetched` bytes came from other nodes; `network` is what its links measured, in
    words. The rest is said in training: steps that were done before, bytes of parameters and optimizer state."""

    rank: int
    bytes_read: int
    fetched: int
    seconds: float
    rss_bytes: int
    network: str = ""
    step: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0


class Start(Message, frozen=True):
    """Run the engine, or the training. The answer is `Started`."""

    answers = ("Started",)

    epoch: int


class Started(Message, frozen=True):
    """The rank runs."""

    rank: int


class Shutdown(Message, frozen=True):
    """End. If `reason` says what is wrong, at once, whatever is under way; it is what the node then ends with. With
    `is_unfinished` too, nothing is: an operator ended the coordinator."""

    reason: str = ""
    is_unfinished: bool = False  # the work is to go on another time


# --- serving
class Submit(Message, frozen=True):
    """A request for the engine, to the node of rank 0. A node that serves HTTP asks the coordinator; the answer is a
    stream of `Outputs`."""

    answers = ("Outputs",)

    request: Request


class Cancel(Message, frozen=True):
    """Nobody waits for this request any more; from a node also the name under which it follows a stored reply."""

    request_id: str


class Outputs(Message, frozen=True):
    """New tokens of some requests, from the driver of an epoch; to a node that serves HTTP, of whichever epoch."""

    epoch: int
    outputs: tuple[Output, ...]


class LoadAdapter(Message, frozen=True):
    """Load this adapter beside the weights, while requests run. The answer is `AdapterReady`."""

    answers = ("AdapterReady",)

    epoch: int
    adapter: AdapterFiles


class AdapterReady(Message, frozen=True):
    """The adapter can be named by requests; the bytes that the rank's adapters now take."""

    nbytes: int


class UnloadAdapter(Message, frozen=True):
    """Let every rank drop an adapter that no request names any more, to the node of rank 0."""

    lora: str
    number: int


# --- training
class Stop(Message, frozen=True):
    """Take no further step: save, and end the run. A node that its own operator stops asks the coordinator for it."""


class News(Message, frozen=True):
    """What a rank reports: rank 0 of a training run an event, as `training.report.events` encodes it; any rank that is
    examined or compared its results, as JSON."""

    content: bytes


class Done(Message, frozen=True):
    """This rank's run has ended, its part of every save included."""


# --- roles of a training run beside its plan
class TakeRole(Message, frozen=True, kw_only=True):
    """Asks a node without a rank to answer a run, until it has a part or the cluster ends. The answers are `Progress`
    while it reads its model, then `RoleTaken`.

    `model` is the name of the role's model, `config` its config as JSON, `vocabulary` the digest of its tokens ("" if
    that is not to be compared), and `dtype` what a teacher computes in. `folder` and `files` say where its weights may
    lie on this node too. Where they do not, those of a teacher, and of a model beside an adapter (`is_base`), are read
    from the coordinator by `ReadBytes`, as `role_file` names them; all others come from the run.
    Nodes that compute one model together have a `rank` of its `plan` and `places` each; their wires, the `team`."""

    answers = ("Progress", "RoleTaken")

    role: RoleName
    model: str
    team: TeamName = ""
    rank: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    plan: Plan | None = None
    places: tuple[RankAddress, ...] = ()
    config: str
    vocabulary: str = ""
    dtype: str = ""
    folder: str = ""
    files: tuple[ModelFileFacts, ...] = ()
    is_base: bool = False


class RolePlaces(Message, frozen=True):
    """All nodes that answer in a role now, to the node of rank 0, which asks them for the `run`; and by their names how
    far others have read their model that are to."""

    role: RoleName
    places: tuple[RankAddress, ...]
    run: str = ""
    reading: dict[str, Progress] = msgspec.field(default_factory=dict)


class RoleAsker(Message, frozen=True):
    """To a node that has a role: it answers the node of rank 0 alone, for this `run`."""

    node: str
    run: str


# --- measurements
class Probe(Message, frozen=True):
    """Asks a rank to measure the network path to rank `target`, or itself if that is its own rank; None: no more.

    The result comes as `News`, or in a survey as `Findings`. `meet`: measure how long sums with this rank take, which
    is asked the same at the same time.
    """

    target: int | None
    meet: bool = False


class Findings(Message, frozen=True):
    """What a rank has measured before there is a plan, as JSON."""

    content: bytes


# --- which end may send what
OfHttp = FromHttpServer | Submit | Cancel
"""What a node sends whose HTTP server answers requests."""

ToHttp = ToHttpServer | Outputs
"""What the coordinator sends to it."""

FromGuest = Hello | Join
ToGuest = Welcome | Joined | Refused
FromFetcher = OpenChunkConnection | GetChunk | ListHubChunks | FindPages | ListPages | GetPage
ToFetcher = ChunkBytes | PagesFound | PageNames | Refused
ToOrder = Prepared | Progress | Loaded | Started | RoleTaken | AdapterReady | Refused
OfNode = Attach | Heartbeat | Failure | ReplicaServes
FromNode = OfNode | ToOrder | OfWeights | OfHttp | Outputs | Stop | News | Done | Findings
Adapters = LoadAdapter | UnloadAdapter
OfReplicas = ServeReplica | Replicas
OfRoles = TakeRole | RolePlaces | RoleAsker
OfRequests = Submit | Cancel | Adapters
OfWork = RankAddresses | Assign | Load | Start | Stop | Probe
ToNode = Attached | Heartbeat | OfReplicas | OfWork | OfRoles | OfRequests | ToWeights | ToHttp | Shutdown | Refused
