"""`PublishedWeights`: the versions of a run's weights that rollout servers get, and how many bytes of them were sent.

Where steps are sampled ahead, servers may need several versions. A question keeps the version that it was asked with,
also when it is asked again because a server was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tllm.core.errors import ClusterError
from tllm.training.questions.run_connection import RunConnection
from tllm.training.rollout_servers.rollout_messages import (
    RolloutAnswer,
    RolloutQuestion,
    RolloutRun,
    WeightBytes,
    WeightHashes,
)
from tllm.training.rollout_servers.weight_chunks import ChunkTable
from tllm.weights.dtypes import memory

MESSAGE_BYTES = 1 << 25
"""Of chunks in one message, about."""

ServerConnection = RunConnection[RolloutRun, RolloutQuestion, RolloutAnswer]


@dataclass(eq=False)
class WeightVersion:
    """A run's weights as they were when they were published. `tensors` stay as they are while `users` is above 0."""

    tensors: Mapping[str, Tensor]
    hashes: bytes = b""
    root: bytes = b""
    users: int = 0
    untold_bytes: int = 0
    """That travelled since somebody asked, to all servers together: hashes, chunks and what was answered."""


class PublishedWeights:
    """`room` makes tensors for one version; `publish` may use it again when nobody needs what it held.

    Several threads call its methods, but for `publish` and `unused`: these one.
    """

    def __init__(self, room: Callable[[], Mapping[str, Tensor]]) -> None:
        self._room = room
        first = WeightVersion(room())
        self.table = ChunkTable.of(first.tensors)
        self._free, self._used = [first], list[WeightVersion]()
        self._last_hashes = b""
        self._lock = threading.Lock()
        self.changed_bytes = 0
        """Of the chunks that are not what they were when they were last published."""

    @property
    def nbytes(self) -> int:
        """All bytes of all chunks."""
        return sum(place.stop - place.start for place in self.table.places)

    def unused(self) -> WeightVersion:
        """Room for the next version."""
        with self._lock:
            free = self._free.pop() if self._free else None
        return WeightVersion(self._room()) if free is None else free

    def publish(self, version: WeightVersion) -> WeightVersion:
        """From now on the tensors of `version` are the weights, or those of another one that are the same. It has one
        user more."""
        hashes = self.table.hashes(version.tensors)
        self.changed_bytes = self.table.nbytes(self.table.unlike(hashes, self._last_hashes))
        self._last_hashes = hashes
        with self._lock:
            if same := next((one for one in self._used if one.hashes == hashes), None):
                self._free.append(version)
                same.users += 1
                return same
            version.hashes, version.root = hashes, self.table.root(hashes)
            version.users, version.untold_bytes = 1, 0
            self._used.append(version)
            return version

    def use(self, version: WeightVersion) -> None:
        """It has one user more."""
        with self._lock:
            version.users += 1

    def release(self, version: WeightVersion) -> None:
        """It has one user less."""
        with self._lock:
            version.users -= 1
            if not version.users:
                self._used.remove(version)
                self._free.append(version)

    def bytes_travelled(self, version: WeightVersion) -> int:
        """For the sake of one version, since this was last asked."""
        with self._lock:
            told, version.untold_bytes = version.untold_bytes, 0
        return told

    def bring(self, connection: ServerConnection, name: str, root: bytes) -> None:
        """Let the server at `name` have the weights of this root: what it lacks of them. ClusterError where it
        cannot."""
        with self._lock:
            version = next(one for one in self._used if one.root == root)
        lacking = self._told(connection, WeightHashes(self.table.digest, version.hashes), version, name)
        for numbers in self._messages(lacking):
            contents = tuple(self._content(version, number) for number in numbers)
            self._told(connection, WeightBytes(tuple(numbers), contents), version, name)

    def _told(
        self, connection: ServerConnection, question: RolloutQuestion, version: WeightVersion, name: str
    ) -> list[int]:
        sent = connection.send_question(question)
        answer, received = connection.receive_answer()
        with self._lock:
            version.untold_bytes += sent + received
        if answer.error:
            raise ClusterError(f"the rollout server at {name} cannot take the weights: {answer.error}")
        if any(not 0 <= number < len(self.table.places) for number in answer.lacking):
            raise ClusterError(
                f"the rollout server at {name} lacks chunk {max(answer.lacking)} of {len(self.table.places)}"
            )
        return list(answer.lacking)

    def _messages(self, lacking: Sequence[int]) -> Iterator[list[int]]:
        """The chunks to send, as many in one message as fit."""
        numbers, nbytes = list[int](), 0
        for number in lacking:
            numbers.append(number)
            nbytes += self.table.nbytes([number])
            if nbytes >= MESSAGE_BYTES:
                yield numbers
                numbers, nbytes = [], 0
        if numbers:
            yield numbers

    def _content(self, version: WeightVersion, number: int) -> bytes:
        name, start, stop = self.table.places[number]
        return bytes(memory(version.tensors[name])[start:stop])
