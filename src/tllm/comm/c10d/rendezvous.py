"""How the ranks of a c10d group find each other: the store carries addresses, the secret proves who is there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.connection import format_address, parse_address
from tllm.cluster.tls import data_client, data_server
from tllm.comm.c10d.secret import check_meeting, found_secret, left_secret, listening_host, new_meeting, shared_secret
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.tuning import tune_between
from tllm.comm.links.connect import Address, connect, open_links
from tllm.comm.links.errors import closed_here, link_named, not_opened, source_gone, target_gone
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import Link
from tllm.comm.links.listener import HELLO_SECONDS, Certificate, Listener
from tllm.core.errors import AuthError, LinkClosed, LinkTimeout
from tllm.spec.plan import Wire

EPOCH, FIRST_TAG = 1, 0
LOOK_SECONDS = 0.1  # between two looks for a rank that has ended, while a link from it is waited for
OPEN_SECONDS = 60.0  # whoever has said in the store where it listens does: a wrong address need not wait for a timeout
MEETING = "tllm/meeting"

logger = logging.getLogger("tllm.comm")


@dataclass
class RendezvousPlace:
    """One rank's place among those that met: who it is, where all are, its links to and from them; ranks are global.

    From each rank to each other there are two links from the beginning, one for collectives and one for sends by
    FIRST_TAG: so that a rank which ends is missed by whoever waits for it, in either way.
    """

    rank: int
    ranks: tuple[int, ...]
    name: str
    seconds: float
    meeting: str
    identity: Identity
    listener: Listener
    addresses: Mapping[int, Address]
    links: dict[Wire, Link] = field(default_factory=dict)

    def open(self) -> None:
        """Open the links that are there from the beginning; each send and receive may take `seconds`."""
        names = (self.name, self.name_of(FIRST_TAG))
        self.links = open_links(
            self.rank,
            self.addresses,
            self.listener,
            [Wire(a, b, name) for name in names for a in self.ranks for b in self.ranks if a != b],
            cluster=self.meeting,
            epoch=EPOCH,
            context=data_client(self.identity),
            deadline=min(self.seconds, OPEN_SECONDS),
            authorize=_is_target,
        )
        for link in self.links.values():
            link.set_deadline(self.seconds)

    def group(self) -> Group:
        """The group of all, which chooses how to sum by what its links measure if they lead to other machines."""
        here = self.ranks.index(self.rank)
        others = {index: rank for index, rank in enumerate(self.ranks) if index != here}
        send = {index: self.links[Wire(self.rank, rank, self.name)] for index, rank in others.items()}
        recv = {index: self.links[Wire(rank, self.rank, self.name)] for index, rank in others.items()}
        group = Group(here, len(self.ranks), send, recv, self.name)
        if words := tune_between(group, [self.addresses[rank][0] for rank in self.ranks]):
            logger.info("group %s", words)
        return group

    def name_of(self, tag: int) -> str:
        """The name of wires that sends of a tag go by."""
        return f"{self.name} tag {tag}"

    def expect(self, wire: Wire) -> None:
        """Welcome one more link to this rank."""
        self.listener.expect(self.meeting, EPOCH, [wire])

    def has_lost(self, peer: int) -> bool:
        """Whether nothing more can go between this rank and another one, which has ended."""
        return all(link.is_over for wire, link in self.links.items() if peer in (wire.source, wire.target))

    def take(self, wire: Wire, given_up: threading.Event) -> Link:
        """The link of a wire to this rank that is expected, when its source has opened it; LinkClosed if it ends."""
        source, target, name = wire
        until = time.monotonic() + self.seconds
        while not self.listener.is_ready(wire, LOOK_SECONDS):
            if given_up.is_set():
                raise closed_here(source, target)
            # The last that it sent may be on its way still.
            if self.has_lost(source) and not self.listener.is_ready(wire, HELLO_SECONDS):
                raise source_gone(source, target, f"a {link_named(name)}", "every other one is closed")
            if time.monotonic() > until:
                raise not_opened(source, target, name, self.seconds, self.listener.address)
        link = self.listener.take(wire, 0.0)
        link.set_deadline(self.seconds)
        return link

    def dial(self, wire: Wire, given_up: threading.Event) -> Link:
        """Open one more link from this rank, when its target expects it; LinkClosed if that ends before."""
        hello, context = LinkHello(self.meeting, EPOCH, *wire), data_client(self.identity)
        over = _Over(given_up, lambda: self.has_lost(wire.target))
        try:
            link = connect(self.addresses[wire.target], context, hello, self.seconds, _is_target, over)
        except LinkTimeout as error:
            if given_up.is_set():
                raise closed_here(wire.source, wire.target) from error
            if self.has_lost(wire.target):
                raise target_gone(wire.source, wire.target, "every link to it is closed") from error
            raise
        link.set_deadline(self.seconds)
        return link


class _Over:
    """Says when a link need not be opened any more: it is given up, or the rank at its other end is lost."""

    def __init__(self, given_up: threading.Event, is_lost: Callable[[], bool]) -> None:
        self._given_up, self._is_lost = given_up, is_lost

    def wait(self, timeout: float) -> bool:
        return self._given_up.wait(timeout) or self._is_lost()


def meet(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    name: str,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> RendezvousPlace:
    """Meet the others of at least two `ranks`, which all call this with a store of their own, within `seconds`."""
    until = time.monotonic() + seconds
    secret = shared_secret(environment)
    host = listening_host(environment, _host_of(store), secret is not None)
    with ExitStack() as stack:
        if rank == ranks[0]:
            meeting = new_meeting()
            secret = secret or stack.enter_context(left_secret(meeting))
            store.set(MEETING, meeting)
        else:
            meeting = check_meeting(_asked(store, MEETING, ranks[0], until))
            secret = secret or found_secret(meeting)
        identity = Authority.of_secret(secret).identity(_speaker(rank))
        listener = Listener(host, 0, data_server(identity), _is_source, patient=True)
        with closed_on_failure(listener):
            store.set(f"{MEETING}/{meeting}/{rank}", format_address(listener.address))
            addresses = {
                other: parse_address(_asked(store, f"{MEETING}/{meeting}/{other}", other, until)) for other in ranks
            }
            place = RendezvousPlace(rank, tuple(ranks), name, seconds, meeting, identity, listener, addresses)
            place.open()
            return place


@contextmanager
def closed_on_failure(listener: Listener) -> Iterator[None]:
    """Listen no longer if the block fails."""
    try:
        yield
    except BaseException:
        listener.close()
        raise


def _asked(store: Store, key: str, rank: int, until: float) -> str:
    """What a rank says of itself in the store, as soon as it does."""
    seconds = max(until - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=seconds))
        return str(store.get(key), "utf-8", "replace")
    except dist.DistStoreError as error:
        raise LinkTimeout(f"rank {rank} did not come to the store within {seconds:.3g} s", "see its log") from error
    except dist.DistNetworkError as error:
        raise LinkClosed(f"the store is gone before rank {rank} had come to it", "see the log of rank 0") from error


def _host_of(store: Store) -> str:
    """The machine that keeps the store; "" for one of files, or of this process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _speaker(rank: int) -> str:
    return f"rank-{rank}"


def _is_source(hello: LinkHello, certificate: Certificate | None) -> None:
    _check(certificate, hello.source)


def _is_target(hello: LinkHello, certificate: Certificate | None) -> None:
    _check(certificate, hello.target)


def _check(certificate: Certificate | None, rank: int) -> None:
    names = [name for _, name in (certificate or {}).get("subjectAltName", ())]
    if names != [_speaker(rank)]:
        raise AuthError(f"{' '.join(names) or 'nobody'} spoke for rank {rank}")
