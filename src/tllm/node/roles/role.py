"""`Role`: what a worker does, such as serving or training with its rank in a plan, and how ranks connect links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, Loaded, Prepared, RankAddress
from tllm.cluster.settings import Wiring
from tllm.cluster.tls import data_client
from tllm.comm.links.connect import LinkHello, LinkOptions, Listener, open_links, transport_for
from tllm.comm.links.link import Link
from tllm.core.errors import AuthError
from tllm.engine.driver import Command
from tllm.node.roles.control import Control
from tllm.node.weights.chunk_fetcher import ChunkFetcher
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.hub_fetch import HubFetch
from tllm.node.weights.model_folder import same_model
from tllm.spec.plan import Wire
from tllm.weights.byte_source import ByteSource, Fetch, LocalFiles
from tllm.weights.load import Progress
from tllm.weights.remote_files import FetchedFiles

CONNECT_SECONDS = 30.0

Certificate = Mapping[str, Any]


class Role(Protocol):
    """Lives in the worker's main thread, which calls `run` and then `close`.

    `outlives`: when a link breaks in `run`, the node does not end, but waits for a new assignment.
    """

    outlives: bool

    def run(self, control: Control) -> None:
        """Compute until there is no more to do, or until `control` says so."""

    def stats(self) -> dict[str, float]:
        """Numbers for the heartbeat, from the control thread."""

    def link_bytes(self) -> dict[str, int]:
        """Payload bytes so far over each of this rank's wires, from the control thread."""

    def command(self, command: Command) -> None:
        """Give a command, such as CloseRing, to the driver; ignored by a role without one. From the control thread."""

    def interrupt(self) -> None:
        """Wake the main thread by an error, if it waits for other ranks. From the control thread."""

    def close(self) -> None: ...


@runtime_checkable
class RankRole(Role, Protocol):
    """The role of a rank in a plan: `prepared` and `load` are called before `run`."""

    rank: int

    def prepared(self) -> Prepared: ...

    def load(self, progress: Progress) -> Loaded: ...


class MakeRole(Protocol):
    """Makes a role, with its links connected. `fetch` brings bytes of the model from other nodes.

    `before` is the node's role until now, which is closed; what it holds in memory may be taken over.
    """

    def __call__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None
    ) -> RankRole: ...


class Placed(Protocol):
    """One of several ranks, and where all of them are."""

    @property
    def cluster(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def places(self) -> tuple[RankAddress, ...]: ...


def connect_wires(
    assign: Placed,
    wires: Iterable[Wire],
    identity: Identity,
    listener: Listener,
    link_seconds: float,
    wiring: Wiring,
    connect_seconds: float = CONNECT_SECONDS,
) -> dict[Wire, Link]:
    """Connect this rank's ends of the wires, all of one kind. Each send and receive may then take `link_seconds`."""

    def speaks_for_target(hello: LinkHello, certificate: Certificate | None) -> None:
        check_speaker(certificate, assign.places[hello.target].node, hello.target)

    links = open_links(
        assign.rank,
        {rank: (place.host, place.port) for rank, place in enumerate(assign.places)},
        listener,
        wires,
        cluster=assign.cluster,
        epoch=assign.epoch,
        options=LinkOptions(
            context=data_client(identity),
            authorize=speaks_for_target,
            deadline=min(connect_seconds, link_seconds),
            transport=transport_for(wiring, identity, [place.host for place in assign.places]),
        ),
    )
    for link in links.values():
        link.set_deadline(link_seconds)
    return links


def check_speaker(certificate: Certificate | None, node: str, rank: int) -> None:
    """AuthError unless a certificate of our authority is that of the node which has this rank."""
    names = [name for _, name in (certificate or {}).get("subjectAltName", ())]
    if names != [node]:
        raise AuthError(f"{' '.join(names) or 'nobody'} spoke for rank {rank}, which is on {node}")


def bytes_by_wire(links: Mapping[Wire, Link]) -> dict[str, int]:
    """Payload bytes moved, by the wire in words: "0>1", or "0>1 dp" if it has a name."""
    return {f"{wire.source}>{wire.target} {wire.name}".strip(): link.bytes_moved for wire, link in links.items()}


def model_source(assign: Assign, fetch: Fetch) -> ByteSource:
    """The model's files: those in a folder here if they are the same, else what other nodes have of them. Of a model on
    the hub what this disk has, else what the hub gives, else what other nodes have."""
    if assign.hub is not None:
        assert isinstance(fetch, ChunkFetcher), "a node fetches, and its cache keeps"
        chunks = HubChunks(assign.hub, fetch.cache)
        return FetchedFiles(HubFetch(chunks, fetch), chunks.sizes)
    folder = Path(assign.folder)
    if same_model(folder, assign.files):
        fetch.found(folder)
        return LocalFiles(folder)
    return FetchedFiles(fetch, {file.name: file.size for file in assign.files})


def fetched(source: ByteSource) -> int:
    """Bytes that came from other nodes, of all that `model_source` gave."""
    return source.fetched if isinstance(source, FetchedFiles) else 0
