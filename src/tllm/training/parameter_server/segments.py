"""What each server of a plan keeps: every bucket cut in ranges like ZeRO's, the input table at borders of its rows.

The architecture is the parameter server's (Li et al., OSDI 2014): replicas compute gradients and keep no state of the
optimizer, servers keep weights and state and compute no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor, nn

from tllm.model.transformer import Transformer
from tllm.training.gradients.bucket_layout import LINE, BucketLayout, GradientBucket


class ServerSegment(NamedTuple):
    """Elements [start, stop) of a bucket, in whole lines. With `row` these are `rows` of the table, each so wide."""

    bucket: int
    start: int
    stop: int
    rows: int = 0
    row: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start

    def by_rows(self, x: Tensor) -> Tensor:
        """A view of the rows in what has an element for each of the segment's."""
        return x[: self.rows * self.row].view(self.rows, self.row)


def segments(
    buckets: Sequence[GradientBucket], parameters: Sequence[nn.Parameter], table: int | None, server: int, servers: int
) -> list[ServerSegment]:
    """What one server keeps, bucket by bucket. `table` is the number of the parameter that travels by rows."""
    found = []
    for number, bucket in enumerate(buckets):
        start, stop = bucket.range_of(server, servers)
        if table is None or table not in bucket.parameters:
            found.append(ServerSegment(number, start, stop))
            continue
        first, row = bucket.starts[bucket.parameters.index(table)], parameters[table].shape[1]
        last = first + -(-parameters[table].numel() // LINE) * LINE
        whole = math.lcm(row, LINE)  # rows that end where a line does
        start, stop = (at - (at - first) % whole if first < at < last else at for at in (start, stop))
        table_start, table_stop = max(start, first), min(stop, last)
        rows = (min(table_stop, first + parameters[table].numel()) - table_start) // row
        found += [
            ServerSegment(number, start, min(stop, first)),
            ServerSegment(number, table_start, table_stop, max(rows, 0), row),
            ServerSegment(number, max(start, last), stop),
        ]
    return [segment for segment in found if segment.size > 0]


def first_row(segment: ServerSegment, buckets: Sequence[GradientBucket], table: int) -> int:
    """The number in the whole table of a segment's first row."""
    bucket = buckets[segment.bucket]
    return (segment.start - bucket.starts[bucket.parameters.index(table)]) // segment.row


def row_table(model: Transformer, parameters: Sequence[nn.Parameter]) -> int | None:
    """The number of the parameter of which a step touches only its tokens' rows: the input table, if it is not tied.

    A tied table is the output's too, where each step moves every row.
    """
    if model.spec.tied or not model.is_first:
        return None
    return next(i for i, parameter in enumerate(parameters) if parameter is model.embed_tokens.weight)


class ServerSegments:
    """The segments of all servers, as a replica exchanges them. `table` is the parameter that travels by rows."""

    def __init__(self, layout: BucketLayout, table: int | None, servers: int) -> None:
        self._layout, self._table = layout, table
        self._of_server = [
            segments(layout.buckets, layout.parameters, table, server, servers) for server in range(servers)
        ]

    def rounds(self) -> Iterator[list[tuple[int, ServerSegment]]]:
        """(server, segment) of all servers side by side, in the order in which each server's segments travel."""
        for group in zip_longest(*self._of_server):
            yield [(server, segment) for server, segment in enumerate(group) if segment is not None]

    def rows_by_server(self, rows: Tensor) -> list[Tensor]:
        """Which of these rows of the whole table each server holds, by their number in its segment."""
        return [self._rows_of(of_server, rows) for of_server in self._of_server]

    def _rows_of(self, of_server: Sequence[ServerSegment], rows: Tensor) -> Tensor:
        for segment in of_server:
            if segment.row and self._table is not None:
                own = rows - first_row(segment, self._layout.buckets, self._table)
                return own[(own >= 0) & (own < segment.rows)]
        return rows[:0]


def part_of(flat: Sequence[Tensor], segment: ServerSegment) -> Tensor:
    """A segment's elements of the flat tensors of all buckets, as a view."""
    return flat[segment.bucket][segment.start : segment.stop]
