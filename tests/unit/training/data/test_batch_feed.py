"""Rows on their way from rank 0: how far ahead they are read, and what is a replica's own of them."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tllm.comm.links.link import LocalLink
from tllm.core.errors import LinkTimeout
from tllm.spec.plan import Plan
from tllm.training.attention.context_parallel import cut_tokens
from tllm.training.data.batch_feed import BatchFeed, EncodedArray, ReplicaBatch, split_global_batch
from tllm.training.data.batch_tensors import tokens_of
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.questions import waiting_ranks
from tllm.training.questions.waiting_ranks import Still, WaitingRanks, nobody

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

    def waits_for(self) -> str:
        return ""

    def interrupt(self) -> None: ...

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


class Awaited(Steps):
    """Two rows a step, which wait for an answer for longer than the other ranks wait for a word of rank 0."""

    def __init__(self, still: Still) -> None:
        super().__init__()
        self._still = still

    def step(self, step: int) -> list[PackedRow]:
        for _ in range(25):
            self._still()
            time.sleep(0.1)
        return super().step(step)


def test_ranks_wait_as_long_as_rank_0_says_that_it_waits_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_ranks, "STILL_SECONDS", 0.3)
    for is_told in (True, False):
        link = LocalLink(0, 1, deadline=1.0)
        still = WaitingRanks({1: link}).still if is_told else nobody
        first = BatchFeed(PLAN, {1: link}, 1, Awaited(still))  # type: ignore[arg-type]
        other = BatchFeed(PLAN, {0: link}, 1, None)
        with contextlib.ExitStack() as feeds:
            for feed in (first, other):
                feeds.callback(feed.close)
                feed.begin(0, 1)
            if is_told:
                want = split_global_batch([row(0, 3, 1), row(0, 5, 1)], PLAN.dp, 1)
                assert [first.next(), other.next()] == want
                continue
            with pytest.raises(LinkTimeout):
                other.next()


def test_a_portion_alone_counts_its_own_rows() -> None:
    rows = [row(0, 3, 1), row(1, 5, 2), row(2, 9, 0)]
    first, second = split_global_batch(rows, (2, 1), 1)
    assert first.predicted == second.predicted == 14 and first.tokens == 17
    alone = first.as_global_batch()
    assert (alone.rows, alone.global_microbatches, alone.lengths, alone.predicted) == (first.rows, 2, (3, 5), 5)
    assert second.as_global_batch().predicted == 9


def test_numbers_of_documents_and_tokens_travel_with_their_rows() -> None:
    margins, chances = np.array([0.5, -1.25]), np.arange(6, dtype=np.float32).reshape(3, 2)
    one = row(0, 3, 1)
    sent = replace(
        one, lengths=(1, 2), of_documents={"margin": margins}, of_tokens={"chances": chances}, given_weight=2
    )
    (batch,) = split_global_batch([sent], (1,), 1)
    came = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=ReplicaBatch)
    assert came == batch and came.denominator == 2 and came.predicted == 2
    (tokens,) = came.unpack()
    assert tokens.of_documents["margin"].tolist() == [0.5, -1.25]
    assert tokens.of_tokens["chances"].tolist() == chances.tolist()
    assert cut_tokens(tokens, 1, 2).of_tokens["chances"].tolist() == [[0, 1], [2, 3]]
    filled = tokens_of([sent, sent], width=5)
    assert filled.of_documents["margin"].tolist() == [0.5, -1.25, 0, 0.5, -1.25, 0]
    assert filled.of_tokens["chances"].shape == (10, 2) and filled.document_T.tolist() == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5]


def test_numbers_of_another_length_than_they_say_are_refused() -> None:
    packed = msgspec.msgpack.encode(("<f8", (2, 3), bytes(40)))
    with pytest.raises(msgspec.ValidationError, match="40 bytes for an array of shape"):
        msgspec.msgpack.decode(packed, type=EncodedArray)
