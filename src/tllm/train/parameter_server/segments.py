"""What each server of a plan keeps: every bucket cut in ranges like ZeRO's, the input table at borders of its rows.

The architecture is the parameter server's (Li et al., OSDI 2014): replicas compute gradients and keep no state of the
optimizer, servers keep weights and state and compute no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from tllm.model.transformer import Transformer
from tllm.train.gradients.bucket_layout import LINE, GradientBucket


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
