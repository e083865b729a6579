"""Links over sends and receives of `torch.distributed` (gloo): plain text, for loopback and networks that are trusted.

Each wire has a process group of its two ranks, apart from the default one, which stays a program's own: what fails on
one wire leaves the others as they are. gloo cannot say whether something is there, nor be woken by another thread; so
each end waits for it in a thread of its own, and is ended by a receive that is late on purpose.

A run of bytes goes as two messages: its length, which the target checks before it takes memory, and then the bytes.
That a message is as long as was said, gloo itself does not check: hence the trust.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from tllm.cluster.connection import is_loopback
from tllm.comm.links.carried_link import FOREVER, RUN_BYTES, CarriedLink, CarrierOffer
from tllm.comm.links.errors import nothing_taken, target_gone
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import DEADLINE, Link
from tllm.core.errors import AuthError, ConfigError, LinkError, LinkTimeout

SOURCE, TARGET = 0, 1  # ranks of a wire's group
RUNS, FAREWELL, NEVER = range(3)  # tags; by the last nothing is ever sent
INTERFACES = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915


class TorchCarry:
    """Makes gloo links of ours. AuthError where `hosts` are on a network that nobody has called trusted."""

    def __init__(self, hosts: Collection[str], trusted: bool) -> None:
        far = [host for host in hosts if not is_loopback(host)]
        if far and not trusted:
            raise AuthError(
                f"links over torch.distributed are not encrypted, and {far[0]} is not this machine's alone",
                "give --trusted-network if nobody else is on that network, or leave out --link torch",
            )

    def source(self, ours: Link, hello: LinkHello, host: str, seconds: float) -> Link:
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
        offer = CarrierOffer.make(port, "")
        offer.tell(ours)
        return _Source(hello, _Pair(_group(store, offer, SOURCE, host, hello, seconds), TARGET)).link

    def target(self, ours: Link, hello: LinkHello, host: str, here: str, seconds: float) -> Link:
        offer = CarrierOffer.hear(ours, seconds)
        try:
            met = dist.TCPStore  # type: ignore[attr-defined]
            store = met(host, offer.port, is_master=False, timeout=timedelta(seconds=seconds))
        except dist.DistError as error:
            raise _unmet(hello, TARGET, seconds) from error
        return _Target(hello, _Pair(_group(store, offer, TARGET, here, hello, seconds), SOURCE)).link


class _Pair:
    """A group of two, as one of them uses it. (torch's stubs do not know what calls a group has.)"""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer

    def send(self, x: torch.Tensor, tag: int, seconds: float) -> None:
        self._group.send([x], self._peer, tag).wait(timedelta(seconds=min(seconds, FOREVER)))

    def recv(self, x: torch.Tensor, tag: int, seconds: float = FOREVER) -> None:
        self._group.recv([x], self._peer, tag).wait(timedelta(seconds=min(seconds, FOREVER)))

    def end(self) -> None:
        """Close the connection, which wakes whoever waits at either end."""
        with contextlib.suppress(RuntimeError):  # a receive that is late always ends with it, and the group too
            self.recv(torch.empty(1, dtype=torch.uint8), NEVER, 0.001)


class _End(ABC):
    """What both ends share: the thread that waits for gloo, and how it is ended."""

    def __init__(self, hello: LinkHello, pair: _Pair) -> None:
        self.link = CarriedLink(hello, DEADLINE)
        self._hello, self._pair = hello, [pair]  # dropped when it is ended, so that its files are closed
        self.link.begin(self)
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
    """Sends what is posted; at the end a length of 0, to which the target says that it has all."""

    def finish(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, pair: _Pair) -> None:
        posted, start = self.link.posted, 0.0
        try:
            for run in posted.runs():
                start = time.monotonic()
                pair.send(torch.tensor([len(run)]), RUNS, posted.deadline)
                pair.send(torch.frombuffer(bytearray(run), dtype=torch.uint8), RUNS, posted.deadline)
            start = time.monotonic()
            pair.send(torch.tensor([0]), RUNS, posted.deadline)
            pair.recv(torch.empty(1, dtype=torch.uint8), FAREWELL, posted.deadline)
        except RuntimeError as error:  # gloo has no other kind
            posted.lose(self._failure(error, time.monotonic() - start))

    def _failure(self, error: RuntimeError, seconds: float) -> LinkError:
        source, target, deadline = self._hello.source, self._hello.target, self.link.posted.deadline
        if seconds >= deadline:
            return nothing_taken(source, target, deadline)
        return target_gone(source, target, _words(error))


class _Target(_End):
    """Brings what arrives."""

    def stop(self) -> None:
        self.link.arrived.end("closed")
        super().stop()

    def _run(self, pair: _Pair) -> None:
        arrived = self.link.arrived
        try:
            while size := _length(pair):
                if not 0 < size <= RUN_BYTES:
                    arrived.end(f"it declared {size} bytes, of at most {RUN_BYTES}")
                    return pair.end()
                run = torch.empty(size, dtype=torch.uint8)
                pair.recv(run, RUNS)
                if not arrived.put(run.numpy().data):
                    return None
            pair.send(torch.ones(1, dtype=torch.uint8), FAREWELL, DEADLINE)
            arrived.end("connection closed")
        except RuntimeError as error:  # gloo has no other kind
            arrived.end(_words(error))


def _length(pair: _Pair) -> int:
    """How many bytes are to come, or 0 for the end."""
    length_1 = torch.zeros(1, dtype=torch.int64)
    pair.recv(length_1, RUNS)
    return int(length_1)


def _group(
    store: Store, offer: CarrierOffer, rank: int, host: str, hello: LinkHello, seconds: float
) -> ProcessGroupGloo:
    """The wire's own group, met in the store under the wire's secret."""
    os.environ[INTERFACES] = interface_of(host)  # gloo's only public way to be told
    try:
        return ProcessGroupGloo(PrefixStore(offer.secret.hex(), store), rank, 2, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _unmet(hello, rank, seconds) from error


def interface_of(host: str) -> str:
    """The network interface that has this IPv4 address. ConfigError if none has."""
    wanted = socket.inet_aton(socket.gethostbyname(host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode())
            try:
                if fcntl.ioctl(probe, SIOCGIFADDR, asked)[20:24] == wanted:
                    return name
            except OSError:  # an interface without an address
                continue
    if is_loopback(host):  # 127.0.0.2 is the same interface's, though not the address that it is known by
        return interface_of("127.0.0.1")
    raise ConfigError(f"no network interface here has the address {host}", "give this machine's own IPv4 address")


def _unmet(hello: LinkHello, rank: int, seconds: float) -> LinkTimeout:
    here, other = (hello.source, hello.target) if rank == SOURCE else (hello.target, hello.source)
    return LinkTimeout(
        f"rank {here} did not meet rank {other} for their gloo link within {seconds:.3g} s",
        f"see whether rank {other} runs, and reaches rank {here}",
    )


def _words(error: Any) -> str:
    """gloo's words without the lines and the place in its source before them."""
    return f"gloo says {str(error).splitlines()[0].rpartition('] ')[2]}"
