"""Buckets of gradients against those that training fills, and sums beside the pass that fills them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.comm.collectives import group
from tllm.parallel import replicated as replicas
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.planner.cost.buckets import ROOM_BYTES, Bucket, exposed_seconds, fill_order, receive_bytes
from tllm.training.gradients.bucket_layout import LINE, lay_out


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200))
def test_they_are_those_that_training_fills(lines: list[int], limit: int) -> None:
    sizes = [LINE * one for one in lines]
    ours = fill_order([4 * size for size in sizes], 4 * LINE * limit)
    parameters = [cut_parameter((size,), Shard((ShardPiece("p"),))) for size in sizes]
    theirs = lay_out(parameters, 4 * LINE * limit)
    assert [one.part * sum(sizes) for one in ours] == pytest.approx([one.size for one in theirs])
    assert ours[-1].done == pytest.approx(1.0) and sum(one.part for one in ours) == pytest.approx(1.0)


def test_one_bucket_is_summed_when_the_pass_is_over() -> None:
    assert exposed_seconds([Bucket(1.0, 1.0)], all_reduces=3.0, backward=2.0) == pytest.approx(3.0)


def test_the_last_bucket_is_waited_for_where_links_are_fast() -> None:
    halves = [Bucket(0.5, 0.5), Bucket(0.5, 1.0)]
    assert exposed_seconds(halves, all_reduces=1.0, backward=2.0) == pytest.approx(0.5)
    assert exposed_seconds(halves, all_reduces=4.0, backward=2.0) == pytest.approx(3.0), (
        "all but what goes beside the second half"
    )


def test_many_buckets_hide_as_much_as_the_pass_takes() -> None:
    many = [Bucket(0.001, (place + 1) / 1000) for place in range(1000)]
    assert exposed_seconds(many, all_reduces=5.0, backward=2.0) == pytest.approx(3.0, rel=1e-2)
    assert exposed_seconds(many, all_reduces=1.0, backward=2.0) == pytest.approx(0.0, abs=2e-3)


def test_nothing_is_waited_for_where_there_is_nothing() -> None:
    assert exposed_seconds(fill_order([], 1), all_reduces=0.0, backward=2.0) == 0.0


def test_a_room_grows_and_the_one_before_it_is_left_over() -> None:
    assert receive_bytes([10, 30, 20, 40, 5], ranks=2) == 40 + 30
    assert receive_bytes([40, 10], ranks=2) == 40
    assert receive_bytes([30], ranks=3) == 20, "a piece of each of two others"
    assert receive_bytes([30], ranks=2, cut=True) == 15, "the other's part of this rank's range"
    assert receive_bytes([30], ranks=1) == receive_bytes([], ranks=4) == 0


def test_no_room_is_longer_than_a_part() -> None:
    assert ROOM_BYTES == group.ROOM_BYTES == 4 * replicas.MAX_ELEMENTS
    assert receive_bytes([ROOM_BYTES], 2) == ROOM_BYTES
    assert receive_bytes([ROOM_BYTES + 2], 2) == ROOM_BYTES // 2 + 1
    assert receive_bytes([100 * ROOM_BYTES], 2) == ROOM_BYTES
