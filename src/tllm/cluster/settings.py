"""What every rank of a plan agrees on beside the model, to serve it, train it, answer runs with it, be examined,
surveyed or compared."""

from __future__ import annotations

from typing import Literal

import msgspec

from tllm.spec.process_groups import RoleName
from tllm.spec.speculative_config import SpeculativeConfig

Narrowing = Literal["off", "bf16", "int8", "auto"]
LinkKind = Literal["tls", "grpc", "torch"]
IntraHost = Literal["memory", "links", "nccl"]


class Wiring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kind of a plan's links (`comm.links.connect.transport_for`).

    "torch" is not encrypted, and is used between machines only where the network is `trusted`. `intra_host`: what
    carries tensors between ranks on one machine. "memory": ranks that serve on processors sum in memory that they share
    (`comm.links.shared_memory`), all else goes by links. "nccl": devices use NCCL (`comm.collectives.intra_host`).
    """

    kind: LinkKind = "tls"
    trusted: bool = False
    intra_host: IntraHost = "memory"


OUR_LINKS = Wiring()


class PageDisk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where ranks keep pages of the KV cache: `folder`, of `limit` bytes at most on each machine.

    `model` stands for all that the numbers in a page follow from, beside its tokens.
    """

    folder: str
    limit: int
    model: str


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What every rank that serves agrees on beside the model. `threads` 0 leaves the number to the node.

    `narrow_wire`: how hidden states travel between stages, `auto` only where it saves time
    (`comm.collectives.compressed_hop`). `speculative_config` names the draft model of the first rank, if there is one.
    `device` is where a rank computes: each node puts its own in its place, as in the settings of other work.
    """

    dtype: str
    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    speculative_config: SpeculativeConfig | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    page_disk: PageDisk | None = None
    threads: int
    link_seconds: float
    narrow_wire: Narrowing = "off"
    wiring: Wiring = OUR_LINKS
    device: str = "cpu"


class PredictedSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was predicted of a step under a `plan`: seconds of all together as "step", and by role where there are
    several."""

    plan: str
    by_role: dict[str, float]


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What every rank that trains agrees on: `job` as JSON. `link_seconds`: a rank may wait so long for another's work.

    That a node is gone is noticed much sooner, by its heartbeats and its connections. `outlives`: when a rank is lost,
    the others wait for a new part; `mirrored`: each has the other ranks' last steps in memory, as
    `training.snapshot.replication` says.
    `run` names the run as long as its folder is there: what memory holds of another one is of no use.
    `device` is where a rank computes: each node puts its own in its place. `predicted` is told beside what is measured.
    """

    job: str
    threads: int
    link_seconds: float
    predicted: PredictedSeconds | None = None
    outlives: bool = False
    mirrored: bool = False
    wiring: Wiring = OUR_LINKS
    run: str = ""
    device: str = "cpu"


class DoctorSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What every examined node is told: for how many seconds it measures itself, and each path to another node."""

    measure_seconds: float
    way_seconds: float
    threads: int
    link_seconds: float


class VerifySettings(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What every rank of a comparison agrees on: the engine's settings, one prompt, and the folder of the reference."""

    engine: EngineSettings
    token_ids: tuple[int, ...]
    truth: str
    threads: int
    link_seconds: float


class SurveySettings(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What every node is told that measures itself with a model, before there is a plan.

    `intra_host` is the `Wiring`'s: sums of two nodes of one machine are measured as they will be made.
    To serve: `sequences` with a token each after a prompt of `length` tokens, of which `rows[0]` go through at once. To
    train (no `sequences`): microbatches of so many `rows`, in documents of `length`, and this `optimizer`. Where the
    run samples completions: `rollouts` of them, with a token each after a prompt of `prompt` tokens.
    """

    dtype: str
    length: int
    rows: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    optimizer: str = "adamw"
    rollouts: tuple[int, ...] = ()
    prompt: int = 0
    measure_seconds: float
    way_seconds: float
    threads: int = 0
    link_seconds: float
    intra_host: IntraHost = "memory"
    device: str = "cpu"


class AnswerSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What every rank of a `model`, as it was asked for, agrees on that answers training runs elsewhere in a `role`.

    `vocabulary` is the digest of its tokens, and `dtype` what a teacher computes in. The first rank, which is on the
    machine of the command, listens for runs at `host` and `port`; there is the file of their `secret`, and nowhere
    else. `device` is where a rank computes: each node puts its own in its place.
    """

    role: RoleName
    model: str
    vocabulary: str
    dtype: str
    host: str
    port: int
    secret: str
    threads: int
    device: str = "cpu"


Settings = EngineSettings | TrainSettings | DoctorSettings | VerifySettings | SurveySettings | AnswerSettings
