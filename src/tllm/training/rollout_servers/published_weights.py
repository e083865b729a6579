"""`PublishedWeights`: a run's weights as rollout servers get them, and how many bytes of them have travelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

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


class PublishedWeights:
    """`tensors` keep their places, and change between two calls of `publish`. `bring` is called by several threads."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self.table = tensors, ChunkTable.of(tensors)
        self._hashes = b""
        self._counting = threading.Lock()
        self.changed_bytes = 0
        """Of the chunks that are not what they were when they were last published."""
        self.sent_bytes = 0
        """On the wire, to all servers together, so far: hashes, chunks and what was answered."""

    @property
    def root(self) -> bytes:
        """What names them as they are."""
        return self.table.root(self._hashes)

    @property
    def nbytes(self) -> int:
        """All bytes of all chunks."""
        return sum(place.stop - place.start for place in self.table.places)

    def publish(self) -> None:
        """From now on these are the weights."""
        hashes = self.table.hashes(self._tensors)
        self.changed_bytes = self.table.nbytes(self.table.unlike(hashes, self._hashes))
        self._hashes = hashes

    def bring(self, connection: ServerConnection, name: str) -> None:
        """Let the server at `name` have the weights: what it lacks of them. ClusterError where it cannot."""
        lacking = self._told(connection, WeightHashes(self.table.digest, self._hashes), name)
        for numbers in self._messages(lacking):
            contents = tuple(self._content(number) for number in numbers)
            lacking = self._told(connection, WeightBytes(tuple(numbers), contents), name)
        if lacking:
            raise ClusterError(
                f"the rollout server at {name} lacks {len(lacking)} chunks of weights that it was sent",
                "start it again, and see what its log says",
            )

    def _told(self, connection: ServerConnection, question: RolloutQuestion, name: str) -> list[int]:
        sent = connection.send_question(question)
        answer, received = connection.receive_answer()
        with self._counting:
            self.sent_bytes += sent + received
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

    def _content(self, number: int) -> bytes:
        name, start, stop = self.table.places[number]
        return bytes(memory(self._tensors[name])[start:stop])
