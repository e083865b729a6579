"""How processes that a launcher has started find each other: rank 0 writes address and token to a file that only this
user can read.

All of them must see one folder (one machine, or a shared disk). Otherwise the variable `TLLM_JOIN="HOST:PORT TOKEN"`
tells the others what they would find there. A file that an earlier run left behind names an address where nobody
listens, or a cluster with another authority than its token's, and is ignored.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from tllm.cluster.connection import parse_address
from tllm.core.errors import AuthError, ClusterError, ConfigError
from tllm.node.coordinator.cluster_options import LOOPBACK
from tllm.node.machine.launcher_env import Launched
from tllm.node.machine.process_facts import WILDCARDS, cores, reachable
from tllm.node.worker import Worker, WorkerSettings

MEET_SECONDS = 600.0  # rank 0 may have a tokenizer to train before anything else
LOOK_SECONDS = 0.1
RETRY_SECONDS = 1.0
JOIN_VARIABLE = "TLLM_JOIN"


def node_of(rank: int) -> str:
    """The name of a launched rank's node, by which it gets its rank."""
    return f"rank-{rank}"


def threads_of(launched: Launched) -> int:
    """A rank's part of this machine's processors; a launcher that does not say how many ranks are here has bound us."""
    return max(1, cores() // (launched.local_size or 1))


def meeting_file(launched: Launched, folder: Path) -> Path:
    return folder / f".join-{launched.run}"


def addresses_of(launched: Launched) -> tuple[str, str]:
    """The host that rank 0 listens on, and the one that it tells the others: no farther than they are."""
    if launched.is_one_machine:
        return LOOPBACK[0], LOOPBACK[0]
    try:
        host = str(socket.getaddrinfo(launched.host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        host = ""
    if not host or ipaddress.ip_address(host).is_loopback:  # as /etc/hosts may say of a machine's own name
        return WILDCARDS[0], reachable(WILDCARDS[0])
    return host, host


@contextlib.contextmanager
def announced(file: Path, address: str, token: str) -> Iterator[None]:
    """Tell the other ranks where the coordinator is, as long as the block lasts."""
    beside = file.with_name(f"{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(f"{address} {token}\n")
        beside.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", "give another output_dir") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def work_launched(
    launched: Launched,
    folder: Path,
    environment: Mapping[str, str],
    threads: int = 0,
    seconds: float = MEET_SECONDS,
    memory: int | None = None,
) -> None:
    """Be a rank other than 0 until the run ends. Raises what this node failed with, or that it found nobody.

    All ranks of this machine may together use `memory` bytes, all if None.

    SIGINT and SIGTERM ask for the run to be saved and ended; rank 0 then ends this process too.
    """
    worker = _join(launched, folder, environment, threads or threads_of(launched), seconds, memory)

    def stop(number: int, frame: FrameType | None) -> None:
        worker.ask_to_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    worker.run()


def _join(
    launched: Launched,
    folder: Path,
    environment: Mapping[str, str],
    threads: int,
    seconds: float,
    memory: int | None,
) -> Worker:
    told = environment.get(JOIN_VARIABLE, "").strip()
    if told:
        return _worker(launched, told, threads, memory)
    file = meeting_file(launched, folder)
    until = time.monotonic() + seconds
    failure = f"{file} is not there"
    while time.monotonic() < until:
        if told := _read(file):
            try:
                return _worker(launched, told, threads, memory)
            except (ClusterError, AuthError) as error:  # of an earlier run, perhaps: rank 0 will put its own there
                failure = error.message
                time.sleep(RETRY_SECONDS)
        time.sleep(LOOK_SECONDS)
    raise ClusterError(
        f"rank {launched.rank} found no coordinator within {seconds:g} s: {failure}",
        f"see the log of rank 0; output_dir must be one folder for all, or set {JOIN_VARIABLE}='HOST:PORT TOKEN'",
    )


def _worker(launched: Launched, told: str, threads: int, memory: int | None) -> Worker:
    address, _, token = told.partition(" ")
    host, port = parse_address(address)
    settings = WorkerSettings(
        host=host,
        port=port,
        token=token,
        node=node_of(launched.rank),
        threads=threads,
        memory=memory,
        is_shared=True,
    )
    return Worker(settings)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "start every rank as the same user") from error
