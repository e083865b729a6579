"""The processes of a benchmark: `Seat` is what one needs to reach the others; `run_seats` starts them here."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.settings import LinkKind, Wiring
from tllm.cluster.tls import data_client, data_server
from tllm.comm.collectives.group import Group, group_of
from tllm.comm.links.connect import LinkOptions, Listener, open_links, transport_for
from tllm.core.errors import ClusterError
from tllm.spec.plan import Wire

At = Callable[[int, list[str]], list[str]]
LOOPBACK = "127.0.0.1"
DEADLINE = 600.0  # seconds: the others may be measuring something that does not use our links
SERVICES = 10  # ports of one rank
CONTROL = 7  # the service of the group that keeps the ranks in step
LISTENED = range(10000, 32000)  # Linux gives those who dial a port from 32768 on, others from 49152 on


class Seat(msgspec.Struct, frozen=True):
    """One rank of a benchmark: all ranks' hosts and ports, and this rank's certificate, key and authority (PEM).

    Rank r has the SERVICES ports from `ports[r]` on.
    """

    rank: int
    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    certificate: bytes
    key: bytes
    authority: bytes

    @property
    def size(self) -> int:
        return len(self.hosts)

    def address(self, rank: int, service: int) -> tuple[str, int]:
        return self.hosts[rank], self.ports[rank] + service

    def group(self, encrypted: bool, service: int, name: str = "bench", kind: LinkKind = "tls") -> Group:
        """A group of all ranks over our own links, on the ports of `service`.

        `encrypted` is whether they use TLS. A `kind` that is never encrypted may be asked for on trusted networks only.
        """
        identity = Identity(f"bench-{self.rank}", self.certificate, self.key, self.authority)
        serving, dialling = (data_server(identity), data_client(identity)) if encrypted else (None, None)
        listener = Listener(*self.address(self.rank, service), serving)
        addresses = {rank: self.address(rank, service) for rank in range(self.size)}
        others = [rank for rank in range(self.size) if rank != self.rank]
        wires = [wire for rank in others for wire in (Wire(self.rank, rank, name), Wire(rank, self.rank, name))]
        try:
            links = open_links(
                self.rank,
                addresses,
                listener,
                wires,
                cluster="bench",
                epoch=1,
                options=LinkOptions(
                    context=dialling,
                    deadline=60,
                    transport=transport_for(Wiring(kind, trusted=True), identity, self.hosts),
                ),
            )
        finally:
            listener.close()
        group = group_of(name, range(self.size), self.rank, links)
        group.set_deadline(DEADLINE)
        return group


def seats_at(hosts: Sequence[str], ports: Sequence[int]) -> list[Seat]:
    """A seat for each rank, with certificates of an authority whose key is not kept."""
    authority = Authority.create()
    identities = [authority.identity(f"bench-{rank}") for rank in range(len(hosts))]
    return [
        Seat(rank, tuple(hosts), tuple(ports), identity.certificate, identity.key, authority.pem)
        for rank, identity in enumerate(identities)
    ]


def run_seats(seats: Sequence[Seat], what: str, asked: msgspec.Struct, at: At = lambda rank, command: command) -> bytes:
    """Run `tllm bench <what>` for each seat in a process of this machine; returns the result that rank 0 wrote, JSON.

    `asked` are the settings. `at(rank, command)` is the command line that runs `command` where that rank belongs.
    ClusterError when a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="tllm-bench-") as name, ExitStack() as stack:
        folder, processes = Path(name), list[subprocess.Popen[str]]()
        result = folder / "result.json"
        (folder / "asked.json").write_bytes(msgspec.json.encode(asked))
        for seat in seats:
            file = folder / f"seat-{seat.rank}.json"
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(msgspec.json.encode(seat))
            files = ["--seat", str(file), "--asked", str(folder / "asked.json"), "--result", str(result)]
            command = [sys.executable, "-m", "tllm.cli", "bench", what, *files]
            process = subprocess.Popen(at(seat.rank, command), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            processes.append(process)
        _wait_for_all(processes)
        return result.read_bytes()


def _wait_for_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Return when all have ended with exit code 0; if one fails, kill the others and raise a ClusterError."""
    with ThreadPoolExecutor(len(processes)) as pool:
        ranks = {pool.submit(_stderr_until_end, process): rank for rank, process in enumerate(processes)}
        for future in as_completed(ranks):
            rank = ranks[future]
            if processes[rank].returncode:
                for process in processes:
                    process.kill()
                lines = future.result().strip().splitlines()[-3:]
                raise ClusterError(f"rank {rank} of the bench failed: {' '.join(lines) or 'without a word'}")


def _stderr_until_end(process: subprocess.Popen[str]) -> str:
    """What a process writes to stderr until it ends; its stdin stays open until then."""
    assert process.stderr is not None
    text = process.stderr.read()
    process.wait()
    return text


def free_ports(ranks: int) -> list[int]:
    """For each rank the first of SERVICES consecutive ports that are free on this machine now."""
    first = free_row(ranks * SERVICES)
    return [first + rank * SERVICES for rank in range(ranks)]


def free_row(count: int) -> int:
    """The first of `count` consecutive free ports, below those that the system gives to outgoing connections."""
    while True:
        first = random.choice(LISTENED)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True
