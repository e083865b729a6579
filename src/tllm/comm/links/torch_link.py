"""Links over point-to-point messages of `torch.distributed` (gloo): clear text, for loopback and trusted networks.

Each wire has a gloo process group of its two ranks, so that a failure on one wire leaves the others as they are. The
default process group is left to the program. gloo has no call that asks whether a message is there, and none that
wakes a thread which waits; so each end has a thread of its own that waits, and is ended by a receive with a timeout
that is meant to expire, which closes the connection.

A chunk of bytes goes as two messages: its length, which the target checks before it takes memory, and the bytes. gloo
does not check that a message has the length that its receiver expects: this is why the network must be trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from tllm.cluster.connection import is_loopback
from tllm.comm.links.errors import target_gone
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import DEADLINE, Link
from tllm.comm.links.transport_link import CHUNK_BYTES, FOREVER, TransportLink, TransportOffer
from tllm.core.errors import AuthError, ConfigError, LinkTimeout

SOURCE, TARGET = 0, 1  # ranks of a wire's process group
CHUNKS, FAREWELL, NEVER = range(3)  # message tags; with the last one nothing is ever sent
INTERFACES = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915


class TorchTransport:
    """The gloo transport. AuthError where `hosts` has other machines and nobody has called the network trusted."""

    def __init__(self, hosts: Collection[str], trusted: bool) -> None:
        far = [host for host in hosts if not is_loopback(host)]
        if far and not trusted:
            raise AuthError(
                f"links over torch.distributed are not encrypted, and {far[0]} is not this machine's alone",
                "give --trusted-network if nobody else is on that network, or leave out --link torch",
            )

    def open_source(self, ours: Link, hello: LinkHello, host: str, seconds: float) -> Link:
        with socket.create_server((host, 0)) as listening:  # where others reach us, not on every interface
            port = listening.getsockname()[1]
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        offer = TransportOffer.make(port, "")
        offer.send(ours)
        return _Source(hello, _Pair(_group(store, offer, SOURCE, host, hello, seconds), TARGET)).link

    def open_target(self, ours: Link, hello: LinkHello, host: str, here: str, seconds: float) -> Link:
        offer = TransportOffer.receive(ours, seconds)
        try:
            make_store = dist.TCPStore  # type: ignore[attr-defined]
            store = make_store(host, offer.port, is_master=False, timeout=timedelta(seconds=seconds))
        except dist.DistError as error:
            raise _not_met(hello, TARGET, seconds) from error
        return _Target(hello, _Pair(_group(store, offer, TARGET, here, hello, seconds), SOURCE)).link


class _Pair:
    """A process group of two ranks, as one of them uses it. (torch's stubs do not have the methods of a group.)

    What it sends and receives has for ever: gloo would count time in which this process stands still itself, and who
    is late is known by the queues of the link.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer

    def send(self, x: torch.Tensor, tag: int) -> None:
        self._group.send([x], self._peer, tag).wait(timedelta(seconds=FOREVER))

    def recv(self, x: torch.Tensor, tag: int, seconds: float = FOREVER) -> None:
        self._group.recv([x], self._peer, tag).wait(timedelta(seconds=seconds))

    def end(self) -> None:
        """Close the connection, which wakes whoever waits at either end."""
        with contextlib.suppress(RuntimeError):  # a receive that times out raises it, and ends the group
            self.recv(torch.empty(1, dtype=torch.uint8), NEVER, 0.001)


class _End(ABC):
    """What both ends have in common: the thread that waits for gloo, and how it is ended."""

    def __init__(self, hello: LinkHello, pair: _Pair) -> None:
        self.link = TransportLink(hello, DEADLINE)
        self._hello, self._pair = hello, [pair]  # emptied when the pair is ended, so that its files are closed
        self.link.attach(self)
        name = f"link {hello.source}>{hello.target}"
        self._thread = threading.Thread(target=self._run, args=(pair,), name=name, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        return True

    def stop(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was first
            self._pair.pop().end()

    @abstractmethod
    def _run(self, pair: _Pair) -> None: ...


class _Source(_End):
    """Sends the outgoing chunks, then a length of 0, which the target acknowledges when it has all."""

    def finish(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, pair: _Pair) -> None:
        outgoing = self.link.outgoing
        try:
            for chunk in outgoing.chunks():
                pair.send(torch.tensor([len(chunk)]), CHUNKS)
                pair.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), CHUNKS)
            pair.send(torch.tensor([0]), CHUNKS)
            pair.recv(torch.empty(1, dtype=torch.uint8), FAREWELL)
        except RuntimeError as error:  # gloo has no other kind
            outgoing.mark_lost(target_gone(self._hello.source, self._hello.target, _error_text(error)))


class _Target(_End):
    """Receives chunks, and acknowledges the end."""

    def stop(self) -> None:
        self.link.incoming.end("closed")
        super().stop()

    def _run(self, pair: _Pair) -> None:
        incoming = self.link.incoming
        try:
            while size := _length(pair):
                if not 0 < size <= CHUNK_BYTES:
                    incoming.end(f"it declared {size} bytes, of at most {CHUNK_BYTES}")
                    return pair.end()
                chunk = torch.empty(size, dtype=torch.uint8)
                pair.recv(chunk, CHUNKS)
                if not incoming.put(chunk.numpy().data):
                    return None
            pair.send(torch.ones(1, dtype=torch.uint8), FAREWELL)
            incoming.end("connection closed")
        except RuntimeError as error:  # gloo has no other kind
            incoming.end(_error_text(error))


def _length(pair: _Pair) -> int:
    """Bytes of the next chunk, or 0 for the end."""
    length_1 = torch.zeros(1, dtype=torch.int64)
    pair.recv(length_1, CHUNKS)
    return int(length_1)


def _group(
    store: Store, offer: TransportOffer, rank: int, host: str, hello: LinkHello, seconds: float
) -> ProcessGroupGloo:
    """The wire's process group; its two ranks find each other in the store, under keys that begin with the secret."""
    os.environ[INTERFACES] = interface_of(host)  # the only public way to choose gloo's interface
    try:
        return ProcessGroupGloo(PrefixStore(offer.secret.hex(), store), rank, 2, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _not_met(hello, rank, seconds) from error


def interface_of(host: str) -> str:
    """The network interface that has this IPv4 address. ConfigError if none has."""
    wanted = socket.inet_aton(socket.gethostbyname(host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                if fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24] == wanted:
                    return name
            except OSError:  # an interface without an address
                continue
    if is_loopback(host):  # 127.0.0.2 belongs to the same interface, which lists 127.0.0.1 only
        return interface_of("127.0.0.1")
    raise ConfigError(f"no network interface here has the address {host}", "give this machine's own IPv4 address")


def _not_met(hello: LinkHello, rank: int, seconds: float) -> LinkTimeout:
    here, other = (hello.source, hello.target) if rank == SOURCE else (hello.target, hello.source)
    return LinkTimeout(
        f"rank {here} did not meet rank {other} for their gloo link within {seconds:.3g} s",
        f"see whether rank {other} runs, and reaches rank {here}",
    )


def _error_text(error: Any) -> str:
    """gloo's message: its first line, without the place in gloo's source."""
    return f"gloo says {str(error).splitlines()[0].rpartition('] ')[2]}"
