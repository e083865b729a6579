"""Rows for forward passes alone: dealt so that every replica has the same number of microbatches, and sent to all
ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from tllm.comm.links.link import Link
from tllm.spec.plan import Plan
from tllm.training.data.batch_feed import ReplicaBatch, receive_part, send_parts, split_global_batch
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow

MICROBATCHES = 8
"""Microbatches of a replica between two meetings of all ranks."""

NOTHING = ReplicaBatch()
"""What is sent when no further rows come."""


@dataclass(frozen=True)
class ForwardFeed:
    """Sends rows from rank 0 to every rank of the plan, by links that lead from rank 0 or, elsewhere, to it alone.

    `microbatches`: how many each replica computes one after another; more of them keep a pipeline busier.
    """

    plan: Plan
    links: Mapping[int, Link]
    microbatch_size: int
    microbatches: int

    @property
    def rows_at_once(self) -> int:
        return len(self.plan.dp) * self.microbatches * self.microbatch_size

    def send(self, rows: Sequence[PackedRow]) -> ReplicaBatch:
        """On rank 0: give each replica its part of at most `rows_at_once` rows; the first replica's."""
        assert rows, "that nothing comes is told by `end`"
        parts = split_global_batch(
            filled_up(rows, len(self.plan.dp) * self.microbatch_size), (1,) * len(self.plan.dp), self.microbatch_size
        )
        send_parts(parts, self.plan, self.links)
        return parts[0]

    def end(self) -> None:
        """On rank 0: nothing more comes."""
        for link in self.links.values():
            link.send_bytes(msgspec.msgpack.encode(NOTHING))

    def receive(self) -> Iterator[ReplicaBatch]:
        """On another rank: its replica's part of what is sent, up to the end."""
        while (batch := receive_part(self.links)).rows:
            yield batch


def filled_up(rows: Sequence[PackedRow], multiple: int) -> list[PackedRow]:
    """Rows and, up to a multiple of so many, copies of the first that count for nothing."""
    blank = _blank(rows[0])
    return [*rows, *(blank for _ in range(-len(rows) % multiple))]


def _blank(row: PackedRow) -> PackedRow:
    """A row as long, in which nothing is predicted and every number is 0."""
    return replace(
        row,
        labels=np.full_like(row.labels, IGNORED),
        of_documents={name: np.zeros_like(array) for name, array in row.of_documents.items()},
        of_tokens={name: np.zeros_like(array) for name, array in row.of_tokens.items()},
        given_weight=0.0,
    )
