"""Rendezvous: how the ranks of a `torch.distributed` process group find each other and open links.

The store, which is not encrypted, carries addresses only. The secret that all ranks share proves who they are: each
rank has a certificate of the authority that the secret makes (`secret.py`), and links use mutual TLS with these.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.connection import Address, format_address, parse_address
from tllm.cluster.tls import data_client, data_server
from tllm.comm.c10d.secret import (
    check_meeting_name,
    listening_host,
    new_meeting_name,
    read_secret_file,
    secret_file,
    secret_from_environment,
)
from tllm.comm.collectives.group import Group, group_of
from tllm.comm.collectives.tuning import tune_between_hosts
from tllm.comm.links.connect import LinkOptions, connect, open_links
from tllm.comm.links.errors import closed_here, link_named, not_opened, source_gone, target_gone
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import Link
from tllm.comm.links.listener import HELLO_SECONDS, Certificate, Listener
from tllm.core.errors import AuthError, LinkClosed, LinkTimeout
from tllm.spec.plan import Wire

EPOCH, FIRST_TAG = 1, 0
LOOK_SECONDS = 0.1
"""Between two checks whether a rank has ended, while a link from it is waited for."""

OPEN_SECONDS = 60.0
"""To open all links. Each rank listens before it writes its address, so a wrong address need not wait for a timeout."""

MEETING = "tllm/meeting"
"""The store's key under which rank 0 writes the meeting's name, and the prefix of the keys with addresses."""

logger = logging.getLogger("tllm.comm")


@dataclass
class ProcessGroupLinks:
    """What one rank has after the rendezvous: all addresses, and its links to and from every other rank.

    Ranks are global. `seconds` is the deadline of each send and receive, `meeting` the name of this rendezvous. From
    each rank to each other there are two links from the beginning, one for collectives and one for messages with the
    tag FIRST_TAG, so that whoever waits in either way notices when the other rank ends.
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
        """Open the links that are there from the beginning."""
        names = (self.name, self.name_of(FIRST_TAG))
        self.links = open_links(
            self.rank,
            self.addresses,
            self.listener,
            [Wire(a, b, name) for name in names for a in self.ranks for b in self.ranks if a != b],
            cluster=self.meeting,
            epoch=EPOCH,
            options=LinkOptions(
                context=data_client(self.identity), authorize=_is_target, deadline=min(self.seconds, OPEN_SECONDS)
            ),
        )
        for link in self.links.values():
            link.set_deadline(self.seconds)

    def group(self) -> Group:
        """The group of all ranks; if they are on several machines, its links are measured to choose algorithms."""
        group = group_of(self.name, self.ranks, self.rank, self.links)
        if words := tune_between_hosts(group, [self.addresses[rank][0] for rank in self.ranks]):
            logger.info("group %s", words)
        return group

    def name_of(self, tag: int) -> str:
        """The name of the wires for messages with this tag."""
        return f"{self.name} tag {tag}"

    def expect(self, wire: Wire) -> None:
        """Let the listener welcome one more link to this rank."""
        self.listener.expect(self.meeting, EPOCH, [wire])

    def has_lost(self, peer: int) -> bool:
        """Whether another rank has ended: every link between it and this rank is over."""
        return all(link.is_over for wire, link in self.links.items() if peer in (wire.source, wire.target))

    def accept(self, wire: Wire, cancelled: threading.Event) -> Link:
        """The link of an expected wire to this rank, when its source has opened it; LinkClosed if the source ends."""
        source, target, name = wire
        until = time.monotonic() + self.seconds
        while not self.listener.is_ready(wire, LOOK_SECONDS):
            if cancelled.is_set():
                raise closed_here(source, target)
            # A rank may have opened this link just before it ended.
            if self.has_lost(source) and not self.listener.is_ready(wire, HELLO_SECONDS):
                raise source_gone(source, target, f"a {link_named(name)}", "every other one is closed")
            if time.monotonic() > until:
                raise not_opened(source, target, name, self.seconds, self.listener.address)
        link = self.listener.accept(wire, 0.0)
        link.set_deadline(self.seconds)
        return link

    def dial(self, wire: Wire, cancelled: threading.Event) -> Link:
        """Open one more link from this rank, when its target expects it; LinkClosed if the target ends before."""
        hello, context = LinkHello(self.meeting, EPOCH, *wire), data_client(self.identity)
        unwanted = _Unwanted(cancelled, lambda: self.has_lost(wire.target))
        try:
            link = connect(self.addresses[wire.target], context, hello, self.seconds, _is_target, unwanted)
        except LinkTimeout as error:
            if cancelled.is_set():
                raise closed_here(wire.source, wire.target) from error
            if self.has_lost(wire.target):
                raise target_gone(wire.source, wire.target, "every link to it is closed") from error
            raise
        link.set_deadline(self.seconds)
        return link


class _Unwanted:
    """A `Cancellation`: the link is not wanted any more, or the rank at its other end has ended."""

    def __init__(self, cancelled: threading.Event, is_lost: Callable[[], bool]) -> None:
        self._cancelled, self._is_lost = cancelled, is_lost

    def wait(self, timeout: float) -> bool:
        return self._cancelled.wait(timeout) or self._is_lost()


def join_rendezvous(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    name: str,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> ProcessGroupLinks:
    """Find the other ranks, at least one, through the store and open the links, within `seconds`.

    All `ranks` call this at the same time, each with its own client of the store. LinkTimeout for a rank that does not
    come, AuthError where ranks have no secret in common.

    When all have met, the store holds nothing by which a later rendezvous could be misled: ranks that live on after one
    was lost meet again by the same store, or by another.
    """
    until = time.monotonic() + seconds
    secret = secret_from_environment(environment)
    host = listening_host(environment, _host_of(store), secret is not None)
    with ExitStack() as stack:
        if rank == ranks[0]:
            meeting = new_meeting_name()
            secret = secret or stack.enter_context(secret_file(meeting))
            store.set(MEETING, meeting)
            stack.callback(_forget_meeting, store)
        else:
            meeting = check_meeting_name(_wait_for_key(store, MEETING, ranks[0], until))
            secret = secret or read_secret_file(meeting)
        identity = Authority.of_secret(secret).identity(_certificate_name(rank))
        listener = Listener(host, 0, data_server(identity), _is_source, patient=True)
        with closed_on_failure(listener):
            store.set(f"{MEETING}/{meeting}/{rank}", format_address(listener.address))
            addresses = {
                other: parse_address(_wait_for_key(store, f"{MEETING}/{meeting}/{other}", other, until))
                for other in ranks
            }
            rank_links = ProcessGroupLinks(rank, tuple(ranks), name, seconds, meeting, identity, listener, addresses)
            rank_links.open()
            return rank_links


@contextmanager
def closed_on_failure(listener: Listener) -> Iterator[None]:
    """Close the listener if the block fails."""
    try:
        yield
    except BaseException:
        listener.close()
        raise


def _wait_for_key(store: Store, key: str, rank: int, until: float) -> str:
    """The value of a key, as soon as `rank` has written it."""
    seconds = max(until - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=seconds))
        return str(store.get(key), "utf-8", "replace")
    except dist.DistStoreError as error:
        raise LinkTimeout(f"rank {rank} did not come to the store within {seconds:.3g} s", "see its log") from error
    except dist.DistNetworkError as error:
        raise LinkClosed(f"the store is gone before rank {rank} had come to it", "see the log of rank 0") from error


def _forget_meeting(store: Store) -> None:
    """All have read the meeting's name, or it is given up: whoever comes next waits for a new one."""
    with suppress(dist.DistError):  # a store that is gone misleads nobody
        store.delete_key(MEETING)


def _host_of(store: Store) -> str:
    """The machine of the store's server; "" for a store in a file or in this process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _certificate_name(rank: int) -> str:
    return f"rank-{rank}"


def _is_source(hello: LinkHello, certificate: Certificate | None) -> None:
    _check(certificate, hello.source)


def _is_target(hello: LinkHello, certificate: Certificate | None) -> None:
    _check(certificate, hello.target)


def _check(certificate: Certificate | None, rank: int) -> None:
    names = [name for _, name in (certificate or {}).get("subjectAltName", ())]
    if names != [_certificate_name(rank)]:
        raise AuthError(f"{' '.join(names) or 'nobody'} spoke for rank {rank}")
