"""Sends the rows of each step from rank 0, which alone reads the data, to the ranks that compute them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from math import prod
from typing import Any, Protocol, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from tllm.comm.links.link import Link
from tllm.core.errors import ConfigError, decoded
from tllm.spec.plan import Plan
from tllm.training.data.batch_tensors import Tokens, tokens_of
from tllm.training.data.encoder import IGNORED, Values
from tllm.training.data.packing import ArrayType, PackedRow, deal
from tllm.training.questions.waiting_ranks import heard

LIMIT = 1 << 30
"""Bytes of one step's rows for one rank, at most."""
NO_ROWS = "what rank 0 sent are no rows"

NOTICE_SECONDS = 5.0
"""After which a rank that waits for rows of others says so; then after twice as long, and so on."""


class EncodedArray(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of documents or tokens as they travel between ranks."""

    dtype: ArrayType
    shape: tuple[int, ...]
    content: bytes

    def __post_init__(self) -> None:
        if len(self.content) != prod(self.shape) * np.dtype(self.dtype).itemsize:
            raise ValueError(f"{len(self.content)} bytes for an array of shape {self.shape} and dtype {self.dtype}")

    def decoded(self) -> NDArray[Any]:
        return np.frombuffer(self.content, dtype=self.dtype).reshape(self.shape)


class EncodedRow(msgspec.Struct, frozen=True, array_like=True):
    """A packed row as it travels between ranks: ids, labels and positions as little-endian int32."""

    ids: bytes
    labels: bytes
    positions: bytes
    lengths: tuple[int, ...]
    weight: float
    of_documents: dict[str, EncodedArray] = {}
    of_tokens: dict[str, EncodedArray] = {}


class ReplicaBatch(msgspec.Struct, frozen=True):
    """One replica's part of a step's global batch: `rows` by microbatch, of which the first is number `first` of all.

    `global_microbatches`, the documents' `lengths`, the number of `predicted` tokens and the `denominator`, which
    divides the sum of the losses, are of the whole global batch.
    `next_position` says where in the data the next step begins, for snapshots; else it is empty. `metrics` are what
    rank 0 knows of the batch as a whole. A `fault` in place of rows says, with a hint, why there is no batch.
    """

    rows: tuple[tuple[EncodedRow, ...], ...] = ()
    first: int = 0
    global_microbatches: int = 0
    lengths: tuple[int, ...] = ()
    predicted: int = 0
    denominator: float = 0.0
    next_position: bytes = b""
    metrics: dict[str, float] = {}
    fault: tuple[str, str] | None = None

    @property
    def tokens(self) -> int:
        """The tokens of the whole global batch, predicted or not."""
        return sum(self.lengths)

    def as_global_batch(self) -> ReplicaBatch:
        """The same rows as if they were the whole global batch: counted for this replica alone."""
        rows = [row for microbatch in self.rows for row in microbatch]
        predicted = sum(int((_numbers(row.labels) != IGNORED).sum()) for row in rows)
        lengths = tuple(length for row in rows for length in row.lengths)
        return ReplicaBatch(self.rows, 0, len(self.rows), lengths, predicted, sum(row.weight for row in rows))

    def unpack(self) -> list[Tokens]:
        """The microbatches as tensors."""
        return [tokens_of([_unpacked(row) for row in rows]) for rows in self.rows]


class StepRows(Protocol):
    """Where the rows of each step come from: `Batches`, or what adds numbers of tokens and documents to theirs."""

    def step(self, step: int) -> list[PackedRow]: ...

    def state(self, step: int) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> int: ...

    def waits_for(self) -> str:
        """From another thread: for whom `step` waits, in words; "" for nobody."""

    def interrupt(self) -> None:
        """From another thread: whoever waits in `step` gets an error."""

    def close(self) -> None: ...


class BatchFeed:
    """Gives this rank its replica's batch of each step; the next `prefetch` steps are read while one is computed.

    On rank 0 `batches` reads the data and `links` lead to every other rank; on these the one link is from rank 0. With
    `with_positions` each batch says where the next step begins.
    """

    def __init__(
        self,
        plan: Plan,
        links: Mapping[int, Link],
        microbatch_size: int,
        batches: StepRows | None,
        prefetch: int = 1,
        with_positions: bool = False,
    ) -> None:
        self._plan, self._links = plan, links
        self._microbatch_size = microbatch_size
        self._batches, self._prefetch, self._with_positions = batches, prefetch, with_positions
        self._thread = ThreadPoolExecutor(1, "tllm-feed")
        self._steps = iter(range(0))
        self._pending: deque[Future[ReplicaBatch]] = deque()

    def begin(self, step: int, stop: int) -> None:
        """Start with `step`, 0 being the run's first; steps from `stop` on are not read."""
        self._steps = iter(range(step, stop))
        self._submit(self._prefetch)

    def next(self, on_wait: Callable[[str], object] = lambda reason: None) -> ReplicaBatch:
        """This replica's batch of the next step; waits until it is here, and says on rank 0 now and then for whom."""
        pending, seconds = self._pending.popleft(), NOTICE_SECONDS
        while self._batches is not None and not wait([pending], seconds).done:
            if reason := self._batches.waits_for():
                on_wait(reason)
                seconds *= 2
        batch = pending.result()
        self._submit(1)
        return batch

    @property
    def is_between(self) -> bool:
        """Always: each step has rows of its own."""
        return True

    @property
    def role_seconds(self) -> dict[str, float]:
        """None: rows are read, and taught, while the step before is computed."""
        return {}

    def microbatches(self, batch: ReplicaBatch) -> list[Tokens]:
        """The batch as tensors."""
        return batch.unpack()

    def position(self, batch: ReplicaBatch) -> bytes:
        """As the batch says."""
        return batch.next_position

    def close(self) -> None:
        """End the thread; its links are closed before, should it wait on one."""
        if self._batches is not None:
            self._batches.interrupt()
        self._thread.shutdown(cancel_futures=True)
        if self._batches is not None:
            self._batches.close()

    def _submit(self, count: int) -> None:
        self._pending.extend(self._thread.submit(self._fetch, step) for step in islice(self._steps, count))

    def _fetch(self, step: int) -> ReplicaBatch:
        """In the thread: read a step's rows and send each rank its part, or receive this rank's from rank 0."""
        if self._batches is None:
            return receive_part(self._links)
        try:
            rows = self._batches.step(step)
            next_position = msgspec.msgpack.encode(self._batches.state(step + 1)) if self._with_positions else b""
            parts = split_global_batch(rows, self._plan.dp, self._microbatch_size, next_position)
        except ConfigError as error:  # a row that cannot be read: all ranks are told, and save the steps before it
            parts = [ReplicaBatch(fault=(error.message, error.hint))] * len(self._plan.dp)
        send_parts(parts, self._plan, self._links)
        return parts[0]


_BATCHES = msgspec.msgpack.Decoder(ReplicaBatch)


def send_parts(parts: Sequence[ReplicaBatch], plan: Plan, links: Mapping[int, Link]) -> None:
    """From rank 0: its replica's part to each other rank, by its number."""
    for rank, link in links.items():
        link.send_bytes(msgspec.msgpack.encode(parts[plan.coordinates(rank).replica]))


def receive_part(links: Mapping[int, Link]) -> ReplicaBatch:
    """On another rank: what rank 0 sent, however long it says that it waits for it."""
    return decoded(heard(links, LIMIT), _BATCHES, NO_ROWS)


def split_global_batch(
    rows: Sequence[PackedRow], shares: Sequence[int], microbatch_size: int, next_position: bytes = b""
) -> list[ReplicaBatch]:
    """Each replica's part of a global batch, in proportion to its share.

    Microbatches are cut first and dealt to replicas then, so that a microbatch is the same under every plan.
    """
    microbatches = [rows[at : at + microbatch_size] for at in range(0, len(rows), microbatch_size)]
    lengths = tuple(length for row in rows for length in row.lengths)
    predicted = sum(int((row.labels != IGNORED).sum()) for row in rows)
    denominator = sum(row.weight for row in rows)
    packed = [tuple(_packed(row) for row in microbatch) for microbatch in microbatches]
    of_all = len(microbatches), lengths, predicted, denominator, next_position
    return [
        ReplicaBatch(tuple(packed[part.start : part.stop]), part.start, *of_all)
        for part in deal(len(microbatches), shares)
    ]


def _packed(row: PackedRow) -> EncodedRow:
    ids, labels, positions = (part.astype("<i4").tobytes() for part in (row.input_ids, row.labels, row.positions))
    return EncodedRow(
        ids, labels, positions, row.lengths, row.weight, _encoded(row.of_documents), _encoded(row.of_tokens)
    )


def _unpacked(row: EncodedRow) -> PackedRow:
    ids, labels, positions = (_numbers(part) for part in (row.ids, row.labels, row.positions))
    of_documents, of_tokens = (
        {name: array.decoded() for name, array in values.items()} for values in (row.of_documents, row.of_tokens)
    )
    return PackedRow(0, ids, labels, positions, row.lengths, (), of_documents, of_tokens, row.weight)


def _encoded(values: Values) -> dict[str, EncodedArray]:
    return {name: EncodedArray(_letters(array), array.shape, array.tobytes()) for name, array in values.items()}


def _letters(array: NDArray[Any]) -> ArrayType:
    known: ArrayType
    for known in get_args(ArrayType):
        if array.dtype == np.dtype(known):
            return known
    raise AssertionError(f"numbers of {array.dtype} do not travel")


def _numbers(part: bytes) -> NDArray[np.int64]:
    return np.frombuffer(part, dtype="<i4").astype(np.int64)
