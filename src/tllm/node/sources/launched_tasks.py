"""`LaunchedTasks`: nodes that torchrun or srun has started. The first one writes its address and a token to a file that
only this user can read, and the others join by it.

All of them must see one folder (one machine, or a shared disk). Otherwise the variable `TLLM_JOIN="HOST:PORT TOKEN"`
tells the others what they would find there; the token may be left out where `TLLM_SECRET` is set. A file that an
earlier run left behind names an address where nobody listens, or a cluster with another authority than its token's, and
is ignored.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from tllm.cluster.connection import parse_address
from tllm.cluster.join_token import JoinToken
from tllm.comm.c10d.secret import secret_from_environment
from tllm.core.disk import private_file
from tllm.core.errors import AuthError, ClusterError, ConfigError
from tllm.node.machine.launcher_env import Launched
from tllm.node.machine.process_facts import WILDCARDS, cores, reachable
from tllm.node.sources.node_source import Labels, OnFailure
from tllm.node.worker import Worker, WorkerSettings

log = logging.getLogger("tllm.node")

MEET_SECONDS = 600.0  # the first may have a tokenizer to train before anything else
LOOK_SECONDS, RETRY_SECONDS = 0.1, 1.0
"""From one look for the file that the first process writes to the next, and after one that led nowhere yet."""

JOIN_VARIABLE = "TLLM_JOIN"
LOOPBACK_HOST = "127.0.0.1"
PLAIN = WorkerSettings(host="", port=0, token="", is_shared=True)
"""A worker that is told nothing but where to join."""


class LaunchedTasks:
    """The other processes, as a `NodeSource` of the first: all are here already. After a loss one comes only where
    torchrun starts it again."""

    def __init__(self, launched: Launched, folder: Path) -> None:
        self._launched = launched
        self._file = meeting_file(launched, folder)

    def watch(self, fail: OnFailure) -> None:
        """Nothing: the launcher ends all when one has failed, or lets the others go on."""

    def start(self, count: int, address: str, token: str) -> None:
        """Tell them where the coordinator is, until `stop`."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with private_file(self._file) as file:
                file.write(f"{address} {token}\n".encode())
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._file}: {error.strerror}", "give another output_dir, or --cluster-folder"
            ) from error

    def nodes(self) -> Mapping[str, Labels]:
        one = self._launched
        return {one.node_of(rank): {**one.labels, "task": str(rank)} for rank in range(1, one.world_size)}

    def stop(self) -> None:
        """Take the file away."""
        self._file.unlink(missing_ok=True)


def threads_of(launched: Launched) -> int:
    """A process's part of this machine's processors; a launcher that does not say how many are here has bound us."""
    given = launched.cores or max(1, cores() // (launched.local_size or 1))
    return min(given, cores())


def meeting_file(launched: Launched, folder: Path) -> Path:
    return folder / f".join-{launched.run}"


def addresses_of(launched: Launched) -> tuple[str, str]:
    """The host that the first listens on, and the one that it tells the others: no farther than they are."""
    if launched.is_one_machine:
        return LOOPBACK_HOST, LOOPBACK_HOST
    try:
        host = str(socket.getaddrinfo(launched.host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        host = ""
    if not host or ipaddress.ip_address(host).is_loopback:  # as /etc/hosts may say of a machine's own name
        return WILDCARDS[0], reachable(WILDCARDS[0])
    return host, host


def save_and_end(worker: Worker) -> None:
    """On a signal: ask for the run to be saved and ended; the first process then ends this one too."""
    worker.ask_to_stop()


def compute_on(worker: Worker) -> None:
    """On a signal, which the first process is sent too: it lets its requests end, and then this one."""
    log.info("computes on until the first process ends the cluster")


def work_launched(
    launched: Launched,
    folder: Path,
    environment: Mapping[str, str],
    settings: WorkerSettings = PLAIN,
    seconds: float = MEET_SECONDS,
    on_signal: Callable[[Worker], None] = save_and_end,
) -> None:
    """Be one of the others until the cluster ends. Raises what this node failed with, or that it found nobody.

    `settings` are those of a worker but for its name and where it joins; `on_signal` answers SIGINT and SIGTERM.
    """
    threads = settings.threads or threads_of(launched)
    own = msgspec.structs.replace(settings, node=launched.node, threads=threads)
    worker = _join(launched, folder, environment, own, seconds)

    def answer(number: int, frame: FrameType | None) -> None:
        on_signal(worker)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, answer)
    worker.run()


def _join(
    launched: Launched, folder: Path, environment: Mapping[str, str], settings: WorkerSettings, seconds: float
) -> Worker:
    told = environment.get(JOIN_VARIABLE, "").strip()
    if told and " " not in told and (secret := secret_from_environment(environment)):
        told = f"{told} {JoinToken.of_secret(secret)}"
        failure = f"{JOIN_VARIABLE} names {told.partition(' ')[0]}"
    elif told:
        return _worker(settings, told)
    else:
        failure = f"{meeting_file(launched, folder)} is not there"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if line := told or _read(meeting_file(launched, folder)):
            try:
                return _worker(settings, line)
            except (ClusterError, AuthError) as error:  # of an earlier run, perhaps, or the first is not there yet
                failure = error.message
                time.sleep(RETRY_SECONDS)
        time.sleep(LOOK_SECONDS)
    raise ClusterError(
        f"{launched.node.replace('-', ' ')} found no coordinator within {seconds:g} s: {failure}",
        f"see the log of the first; all must see one folder, or set {JOIN_VARIABLE}='HOST:PORT TOKEN'",
    )


def _worker(settings: WorkerSettings, told: str) -> Worker:
    address, _, token = told.partition(" ")
    host, port = parse_address(address)
    return Worker(msgspec.structs.replace(settings, host=host, port=port, token=token))


def _read(file: Path) -> str:
    """What the first process wrote. AuthError for a file that others could have written."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
                raise AuthError(
                    f"{file} is not this user's alone, and may name another cluster",
                    "start every task as the same user, and delete the file if nobody knows it",
                )
            return opened.read(4096).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "start every task as the same user") from error
