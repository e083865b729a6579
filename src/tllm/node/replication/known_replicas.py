"""`KnownReplicas`: a file with the addresses of a cluster's replicas, by which a first machine that starts again finds
who coordinates now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Replica, ask_replicas
from tllm.cluster.messages import ReplicaPlace
from tllm.core.disk import DiskTrouble, whole_file
from tllm.core.errors import UNREADABLE, ClusterError, ConfigError

log = logging.getLogger("tllm.node")

REPLICAS_FILE = "replicas.json"
FIND_SECONDS = 30.0
"""How long is waited for a leader where replicas answer: an election may be under way."""

LOOK_SECONDS = 0.3
"""From one question to the replicas to the next, while a node waits for the answer."""

AGAIN_SECONDS = 10.0
"""The same while another cluster forms, which does not wait for it; and from a write that failed to the next."""


class KnownReplicas:
    """The file in `folder`, or memory alone without one, and for those that answer who leads them. `authority` is the
    cluster's."""

    def __init__(self, folder: Path | None, authority: Authority) -> None:
        self._path = None if folder is None else folder / REPLICAS_FILE
        self._identity = authority.identity(COORDINATOR)
        self._last = self._read()
        self._trouble = DiskTrouble(
            log, f"{self._path}, without which this machine would not find its cluster if it started again,"
        )

    def keep(self, places: tuple[ReplicaPlace, ...]) -> None:
        """These are the replicas from now on. One alone is of no use to whoever looks for another."""
        if len(places) > 1 and places != self._last and (self._path is None or self._write(self._path, places)):
            self._last = places

    async def follow(self, replica: Replica) -> None:
        """Keep what changes, as this replica knows it, for ever; what could not be written, again after a while."""
        while True:
            before = replica.raft.log.configuration
            self.keep(before)
            if len(before) == 1 and before[0] == replica.place and before[0] in self._last:
                self._forget()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_SECONDS if self._trouble.is_there else None):
                    await replica.until(lambda: replica.raft.log.configuration != before)  # noqa: B023

    async def coordinator(self, seconds: float = FIND_SECONDS) -> Address | None:
        """Where the coordinator listens. None where no replica answers: there is no cluster any more. ClusterError
        where some do, and none leads within so many seconds."""
        until = time.monotonic() + seconds
        while True:
            found, living = await ask_replicas(self._last, self._identity)
            if found is not None or not living:
                return None if found is None else found.address
            if time.monotonic() > until:
                anew = f"; to begin a new cluster instead, end those and remove {self._path}" if self._path else ""
                raise ClusterError(
                    f"{living} of {len(self._last)} replicas of the cluster's state answer, and none has led for "
                    f"{seconds:g} s",
                    f"start the other machines{anew}",
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def until_led(self, is_wanted: Callable[[], bool]) -> Address | None:
        """Where the coordinator listens, once one of the replicas that are known now says it; None where there are
        none, or once it is not wanted any more."""
        places = self._last
        while places and is_wanted():
            found, _ = await ask_replicas(places, self._identity)
            if found is not None and is_wanted():
                return found.address
            await asyncio.sleep(AGAIN_SECONDS)
        return None

    def _forget(self) -> None:
        """The last replica but this process's own was left out: if this ends, no other can lead, and one that was left
        out and still answers would be waited for in vain."""
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            self._trouble.refused(error)
            return
        self._trouble.accepted()
        self._last = ()

    def _write(self, path: Path, places: tuple[ReplicaPlace, ...]) -> bool:
        """Whether the disk took it."""
        try:
            with whole_file(path) as file:
                file.write(msgspec.json.encode(places))
        except OSError as error:
            self._trouble.refused(error)
            return False
        self._trouble.accepted()
        return True

    def _read(self) -> tuple[ReplicaPlace, ...]:
        if self._path is None:
            return ()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[ReplicaPlace, ...])
        except FileNotFoundError:
            return ()
        except (OSError, *UNREADABLE) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}", "remove it to begin a new cluster") from error
