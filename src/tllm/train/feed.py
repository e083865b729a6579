"""The rows of each step on their way from rank 0, which alone reads the data, to the ranks that compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from tllm.comm.link import Link
from tllm.ground.decode import UNREADABLE
from tllm.ground.errors import FrameError
from tllm.spec.plan import Plan
from tllm.train.data import Batches
from tllm.train.encode import IGNORED
from tllm.train.packed import PackedRow
from tllm.train.packing import deal
from tllm.train.tensors import Tokens, tokens_of

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

    `lengths` of documents, `predicted` tokens and `microbatches` are those of the whole global batch.
    """

    rows: tuple[tuple[Row, ...], ...]
    first: int
    microbatches: int
    lengths: tuple[int, ...]
    predicted: int

    @property
    def tokens(self) -> int:
        """Of the whole global batch."""
        return sum(self.lengths)

    def read(self) -> list[Tokens]:
        """The microbatches as the model takes them."""
        return [tokens_of([_unpacked(row) for row in rows]) for rows in self.rows]


class Feed:
    """Hands out the portions of the steps in turn; the next one is read while a step is computed.

    `batches` are rank 0's, and `links` its own to each other rank; there they are the one from rank 0.
    """

    def __init__(self, plan: Plan, links: Mapping[int, Link], microbatch_size: int, batches: Batches | None) -> None:
        self._plan, self._links = plan, links
        self._microbatch_size = microbatch_size
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, "tllm-feed")
        self._coming: Future[Portion] | None = None

    def begin(self, step: int) -> None:
        """Let `step` be the first that is taken, 0 being the run's first."""
        self._at = step
        self._coming = self._thread.submit(self._next, step)

    def take(self, is_last: bool) -> Portion:
        """The portion of the next step. What comes after the last is not read."""
        assert self._coming is not None, "a feed begins before it is taken from"
        portion = self._coming.result()
        self._at += 1
        self._coming = None if is_last else self._thread.submit(self._next, self._at)
        return portion

    def close(self) -> None:
        """End the thread; its links are closed before, should it wait on one."""
        self._thread.shutdown(cancel_futures=True)
        if self._batches is not None:
            self._batches.close()

    def _next(self, step: int) -> Portion:
        if self._batches is None:
            return _decoded(self._links[0].recv_bytes(LIMIT))
        portions = portions_of(self._batches.step(step), self._plan.dp, self._microbatch_size)
        for other, link in self._links.items():
            link.send_bytes(msgspec.msgpack.encode(portions[self._plan.coordinates(other).replica]))
        return portions[0]


def portions_of(rows: Sequence[PackedRow], shares: Sequence[int], microbatch_size: int) -> list[Portion]:
    """Each replica's part of a global batch. Microbatches are cut before they are dealt: no layout changes one."""
    batches = [rows[at : at + microbatch_size] for at in range(0, len(rows), microbatch_size)]
    lengths = tuple(length for row in rows for length in row.lengths)
    predicted = sum(int((row.labels != IGNORED).sum()) for row in rows)
    packed = [tuple(_packed(row) for row in batch) for batch in batches]
    return [
        Portion(tuple(packed[part.start : part.stop]), part.start, len(batches), lengths, predicted)
        for part in deal(len(batches), shares)
    ]


def _packed(row: PackedRow) -> Row:
    ids, labels, positions = (part.astype("<i4").tobytes() for part in (row.input_ids, row.labels, row.positions))
    return Row(ids, labels, positions, row.lengths)


def _unpacked(row: Row) -> PackedRow:
    ids, labels, positions = (
        np.frombuffer(part, dtype="<i4").astype(np.int64) for part in (row.ids, row.labels, row.positions)
    )
    return PackedRow(0, ids, labels, positions, row.lengths, ())


def _decoded(content: bytes) -> Portion:
    try:
        return msgspec.msgpack.decode(content, type=Portion)
    except UNREADABLE as error:
        raise FrameError(f"what rank 0 sent are no rows: {error}") from error
