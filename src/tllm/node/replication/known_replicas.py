"""`KnownReplicas`: where the replicas of a cluster's state are, kept in a folder, so that a first machine that starts
again finds who coordinates now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import msgspec

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Replica, ask_replicas
from tllm.cluster.messages import ReplicaPlace
from tllm.core.disk import DiskTrouble, whole_file
from tllm.core.errors import ClusterError, ConfigError

log = logging.getLogger("tllm.node")

REPLICAS_FILE = "replicas.json"
FIND_SECONDS = 30.0
"""How long is waited for a leader where replicas answer: an election may be under way."""

LOOK_SECONDS = 0.3
AGAIN_SECONDS = 10.0


class KnownReplicas:
    """The file in `folder` and, for those that answer, who leads them. `authority` is the cluster's."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self._path = folder / REPLICAS_FILE
        self._identity = authority.identity(COORDINATOR)
        self._last = self._read()
        self._trouble = DiskTrouble(
            log, f"{self._path}, without which this machine would not find its cluster if it started again,"
        )

    def keep(self, places: tuple[ReplicaPlace, ...]) -> None:
        """These are the replicas from now on. One alone is of no use to whoever looks for another."""
        if len(places) < 2 or places == self._last:
            return
        try:
            with whole_file(self._path) as file:
                file.write(msgspec.json.encode(places))
        except OSError as error:
            self._trouble.refused(error)
            return
        self._trouble.accepted()
        self._last = places

    async def follow(self, replica: Replica) -> None:
        """Keep what changes, as this replica knows it, for ever; what could not be written, again after a while."""
        while True:
            before = replica.raft.log.configuration
            self.keep(before)
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
                return found
            if time.monotonic() > until:
                raise ClusterError(
                    f"{living} of {len(self._last)} replicas of the cluster's state answer, and none has led for "
                    f"{seconds:g} s",
                    f"start the other machines; to begin a new cluster instead, end those and remove {self._path}",
                )
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> tuple[ReplicaPlace, ...]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[ReplicaPlace, ...])
        except FileNotFoundError:
            return ()
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}", "remove it to begin a new cluster") from error
