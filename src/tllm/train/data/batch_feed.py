"""The rows of each step on their way from rank 0, which alone reads the data, to the ranks that compute them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from tllm.comm.links.link import Link
from tllm.core.errors import UNREADABLE, FrameError
from tllm.spec.plan import Plan
from tllm.train.data.batch_tensors import Tokens, tokens_of
from tllm.train.data.batches import Batches
from tllm.train.data.encoder import IGNORED
from tllm.train.data.packing import PackedRow, deal

LIMIT = 1 << 30
"""Bytes of one step's rows for one rank, at most."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A packed row as it travels: little-endian int32."""

    ids: bytes
    labels: bytes
    positions: bytes
    lengths: tuple[int, ...]


class Portion(msgspec.Struct, frozen=True):
    """What one replica computes of a step: rows by microbatch, each with its number in the global batch.

    `lengths` of documents, `predicted` tokens and `microbatches` are those of the whole global batch. `place`: where
    in the data the next step begins, if that is wanted.
    """

    rows: tuple[tuple[Row, ...], ...]
    first: int
    microbatches: int
    lengths: tuple[int, ...]
    predicted: int
    place: bytes = b""

    @property
    def tokens(self) -> int:
        """Of the whole global batch."""
        return sum(self.lengths)

    def alone(self) -> Portion:
        """The same rows as if they were the whole global batch."""
        rows = [row for microbatch in self.rows for row in microbatch]
        predicted = sum(int((_numbers(row.labels) != IGNORED).sum()) for row in rows)
        lengths = tuple(length for row in rows for length in row.lengths)
        return Portion(self.rows, 0, len(self.rows), lengths, predicted)

    def read(self) -> list[Tokens]:
        """The microbatches as the model takes them."""
        return [tokens_of([_unpacked(row) for row in rows]) for rows in self.rows]


class BatchFeed:
    """Hands out the portions of the steps in turn; the next `ahead` are read while a step is computed.

    `batches` are rank 0's, and `links` its own to each other rank; there they are the one from rank 0. With `places`
    each portion says where the next step begins.
    """

    def __init__(
        self,
        plan: Plan,
        links: Mapping[int, Link],
        microbatch_size: int,
        batches: Batches | None,
        ahead: int = 1,
        places: bool = False,
    ) -> None:
        self._plan, self._links = plan, links
        self._microbatch_size = microbatch_size
        self._batches, self._ahead, self._places = batches, ahead, places
        self._thread = ThreadPoolExecutor(1, "tllm-feed")
        self._steps = iter(range(0))
        self._coming: deque[Future[Portion]] = deque()

    def begin(self, step: int, stop: int) -> None:
        """Let `step` be the first that is taken, 0 being the run's first; steps from `stop` on are not read."""
        self._steps = iter(range(step, stop))
        self._read(self._ahead)

    def take(self) -> Portion:
        """The portion of the next step."""
        portion = self._coming.popleft().result()
        self._read(1)
        return portion

    def close(self) -> None:
        """End the thread; its links are closed before, should it wait on one."""
        self._thread.shutdown(cancel_futures=True)
        if self._batches is not None:
            self._batches.close()

    def _read(self, count: int) -> None:
        self._coming.extend(self._thread.submit(self._next, step) for step in islice(self._steps, count))

    def _next(self, step: int) -> Portion:
        if self._batches is None:
            return _decoded(self._links[0].recv_bytes(LIMIT))
        rows = self._batches.step(step)
        place = msgspec.msgpack.encode(self._batches.state(step + 1)) if self._places else b""
        portions = portions_of(rows, self._plan.dp, self._microbatch_size, place)
        for other, link in self._links.items():
            link.send_bytes(msgspec.msgpack.encode(portions[self._plan.coordinates(other).replica]))
        return portions[0]


def portions_of(
    rows: Sequence[PackedRow], shares: Sequence[int], microbatch_size: int, place: bytes = b""
) -> list[Portion]:
    """Each replica's part of a global batch. Microbatches are cut before they are dealt: no layout changes one."""
    batches = [rows[at : at + microbatch_size] for at in range(0, len(rows), microbatch_size)]
    lengths = tuple(length for row in rows for length in row.lengths)
    predicted = sum(int((row.labels != IGNORED).sum()) for row in rows)
    packed = [tuple(_packed(row) for row in batch) for batch in batches]
    return [
        Portion(tuple(packed[part.start : part.stop]), part.start, len(batches), lengths, predicted, place)
        for part in deal(len(batches), shares)
    ]


def _packed(row: PackedRow) -> Row:
    ids, labels, positions = (part.astype("<i4").tobytes() for part in (row.input_ids, row.labels, row.positions))
    return Row(ids, labels, positions, row.lengths)


def _unpacked(row: Row) -> PackedRow:
    ids, labels, positions = (_numbers(part) for part in (row.ids, row.labels, row.positions))
    return PackedRow(0, ids, labels, positions, row.lengths, ())


def _numbers(part: bytes) -> NDArray[np.int64]:
    return np.frombuffer(part, dtype="<i4").astype(np.int64)


def _decoded(content: bytes) -> Portion:
    try:
        return msgspec.msgpack.decode(content, type=Portion)
    except UNREADABLE as error:
        raise FrameError(f"what rank 0 sent are no rows: {error}") from error
