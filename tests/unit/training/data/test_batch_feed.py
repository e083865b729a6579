"""Rows on their way from rank 0: how far ahead they are read, and what is a replica's own of them."""

from __future__ import annotations

import numpy as np

from tllm.comm.links.link import LocalLink
from tllm.spec.plan import Plan
from tllm.training.data.batch_feed import BatchFeed, split_global_batch
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow

PLAN = Plan.parse("dp=2", 1)


def row(place: int, length: int, ignored: int) -> PackedRow:
    ids = np.full(length, place, np.int32)
    labels = np.where(np.arange(length) < ignored, IGNORED, ids)
    return PackedRow(place, ids, labels, np.arange(length, dtype=np.int32), (length,), ())


class Steps:
    """Two rows a step; keeps which steps were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def step(self, step: int) -> list[PackedRow]:
        self.read.append(step)
        return [row(step, 3, 1), row(step, 5, 1)]

    def close(self) -> None: ...


def test_steps_are_read_so_far_ahead_and_no_further_than_the_last() -> None:
    link, steps = LocalLink(0, 1), Steps()
    first = BatchFeed(PLAN, {1: link}, 1, steps, prefetch=3)  # type: ignore[arg-type]
    other = BatchFeed(PLAN, {0: link}, 1, None, prefetch=3)
    first.begin(4, 9)
    other.begin(4, 9)
    for step in (4, 5, 6):  # while the first takes none
        assert int(other.next().unpack()[0].ids_T[0]) == step
    assert steps.read == [4, 5, 6]
    taken = [int(first.next().unpack()[0].ids_T[0]) for _ in range(5)]
    assert [int(other.next().unpack()[0].ids_T[0]) for _ in range(2)] == [7, 8]
    first.close()
    other.close()
    assert taken == [4, 5, 6, 7, 8] == steps.read


def test_a_portion_alone_counts_its_own_rows() -> None:
    rows = [row(0, 3, 1), row(1, 5, 2), row(2, 9, 0)]
    first, second = split_global_batch(rows, (2, 1), 1)
    assert first.predicted == second.predicted == 14 and first.tokens == 17
    alone = first.as_global_batch()
    assert (alone.rows, alone.global_microbatches, alone.lengths, alone.predicted) == (first.rows, 2, (3, 5), 5)
    assert second.as_global_batch().predicted == 9
