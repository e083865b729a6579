"""Batches survive the wire, and nothing that is not a batch within the limits gets past it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.engine.kits import limits, request
from tllm.core.errors import FrameError
from tllm.engine.schedule.batch import (
    PLAIN_GREEDY,
    Batch,
    BatchEntry,
    Results,
    RingHeartbeat,
    Sampling,
    StopRing,
    decode,
    encode,
)
from tllm.engine.schedule.limits import check_batch, check_results
from tllm.engine.schedule.sequence import Sequence
from tllm.spec.request import TokenLogprobs

ENTRY = BatchEntry(
    7, 4, 3, 5, ((2, 1), (9, 1)), Sampling(temperature=0.5, logit_bias={3: 1.5}, seed=2**64 - 1), (1, 2), 3
)
BATCH = Batch(5, (ENTRY, BatchEntry(8, 0, 1, 1, ((0, 1),), PLAIN_GREEDY)), (1, 2, 3, 4))


@pytest.mark.parametrize(
    "message",
    [
        BATCH,
        RingHeartbeat(),
        StopRing(),
        Results(number=5, token_ids=(1, 2), logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5),)), None)),
    ],
)
def test_there_and_back(message: Batch | RingHeartbeat | StopRing | Results) -> None:
    assert decode(encode(message)) == message


def test_sequences_are_numbered_for_as_long_as_an_engine_runs() -> None:
    late = with_entry(key=2**31)
    assert decode(encode(late)) == late


def test_a_decode_of_eight_is_small() -> None:
    entries = tuple(BatchEntry(i, 500, 1, 100, ((40 * i, 32),), PLAIN_GREEDY) for i in range(8))
    assert len(encode(Batch(1, entries, (5,) * 8))) < 8 * 80


def changed(value: Any, **more: Any) -> Any:
    return msgspec.structs.replace(value, **more)


def with_entry(**more: Any) -> Batch:
    return changed(BATCH, entries=(changed(ENTRY, **more), BATCH.entries[1]))


def with_sampling(**more: Any) -> Batch:
    return with_entry(sampling=changed(ENTRY.sampling, **more))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (changed(BATCH, entries=()), "0 sequences"),
        (changed(BATCH, token_ids=(1, 2, 3)), "3 token ids for 4 places"),
        (changed(BATCH, token_ids=(1, 2, 3, 50)), "token 50 of a vocabulary of 50"),
        (changed(BATCH, entries=(ENTRY, ENTRY), token_ids=(1,) * 6), "comes twice"),
        (changed(BATCH, entries=tuple(changed(BATCH.entries[1], key=i) for i in range(5))), "5 sequences, 1 to 4"),
        (changed(with_entry(count=0), token_ids=(1,)), "no token"),
        (with_entry(start=58), "61 tokens, the context 60"),
        (with_entry(page_table=((2, 1),)), "1 pages of 4 for 7 tokens"),
        (with_entry(page_table=((2, 1), (16, 1))), r"pages \[16, 17\) of 16"),
        (with_entry(page_table=((2, 1), (3, 0), (9, 1))), r"pages \[3, 3\)"),
        (with_entry(page_table=((15, 2),)), r"pages \[15, 17\) of 16"),
        (with_entry(targets=(1, 2, 3, 4)), "4 targets for 3"),
        (with_entry(targets=(50,)), "token 50"),
        (with_entry(prompt_top=21), "prompt_logprobs 21"),
        (with_entry(masks=(b"m",) * 9), "9 masks for"),
        (with_entry(masks=(b"m" * 99,)), "a mask of 99 bytes, at most 70"),
        (with_entry(state_slot=1), "its states in slot 1 of 0"),
        (with_sampling(temperature=float("inf")), "temperature inf"),
        (with_sampling(top_p=float("nan")), "top_p nan"),
        (with_sampling(logit_bias={50: 0.0}), "token 50"),
        (with_sampling(logit_bias={1: float("nan")}), "a penalty or bias of nan"),
        (with_sampling(history=(50,)), "token 50"),
        (with_sampling(history=(1,) * 61), "61 tokens of history, at most 60"),
        (with_sampling(banned=(50,)), "token 50"),
        (with_sampling(logprobs=21), "21 logprobs"),
    ],
)
def test_a_batch_that_points_outside_is_refused(batch: Batch, words: str) -> None:
    check_batch(BATCH, limits())
    with pytest.raises(FrameError, match=words):
        check_batch(batch, limits())


@pytest.mark.parametrize(
    ("drafted", "sampling", "words"),
    [
        (3, PLAIN_GREEDY, "3 drafted tokens, 2 agreed"),
        (2, PLAIN_GREEDY, "2 drafted tokens of 2, and none to choose"),
        (1, None, "1 drafted tokens of 2, and none to choose"),
    ],
)
def test_drafts_that_cannot_be_are_refused(drafted: int, sampling: Sampling | None, words: str) -> None:
    entry = BatchEntry(1, 3, 2, 3, ((0, 2),), sampling, num_draft_tokens=drafted)
    sizes = limits(num_speculative_tokens=2)
    check_batch(Batch(1, (msgspec.structs.replace(entry, num_draft_tokens=1, sampling=PLAIN_GREEDY),), (1, 2)), sizes)
    with pytest.raises(FrameError, match=words):
        check_batch(Batch(1, (entry,), (1, 2)), sizes)


def test_states_have_slots_of_their_own() -> None:
    sizes = limits(num_state_slots=4)
    check_batch(with_entry(state_slot=3), sizes)
    with pytest.raises(FrameError, match="states in slot 4 of 4"):
        check_batch(with_entry(state_slot=4), sizes)
    with pytest.raises(FrameError, match="two sequences have one slot"):
        check_batch(BATCH, sizes)


def test_results_hold_a_token_for_each_drafted_one_and_one_more() -> None:
    batch = Batch(1, (BatchEntry(1, 3, 3, 3, ((0, 2),), PLAIN_GREEDY, num_draft_tokens=2),), (1, 2, 3))
    check_results(Results(number=1, token_ids=(1, 2, 3)), batch, limits())
    with pytest.raises(FrameError, match="1 tokens with 0 log-probabilities, 3 to be chosen"):
        check_results(Results(number=1, token_ids=(1,)), batch, limits())


def test_too_many_tokens_are_refused() -> None:
    batch = Batch(1, (BatchEntry(1, 0, 17, 17, ((0, 5),)),), (1,) * 17)
    with pytest.raises(FrameError, match="17 tokens, 16 agreed"):
        check_batch(batch, limits())


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (Results(number=4, token_ids=(1, 2)), "batch 5 was next"),
        (Results(number=5, token_ids=(1,)), "1 tokens"),
        (Results(number=5, token_ids=(1, 51), prompt_logprobs=((TokenLogprobs(1, -1.0),) * 2,)), "token 51"),
        (Results(number=5, token_ids=(1, 2), logprobs=(None,)), "1 log-probabilities"),
        (Results(number=5, token_ids=(1, 2)), r"\[\] tokens, not \[2\]"),
    ],
)
def test_results_of_another_batch_are_refused(results: Results, words: str) -> None:
    scores = ((TokenLogprobs(1, -1.0), TokenLogprobs(2, -1.0)),)
    for second in (2, 50):  # the vocabulary's size: no token could be drawn
        check_results(Results(number=5, token_ids=(1, second), prompt_logprobs=scores), BATCH, limits())
    with pytest.raises(FrameError, match=words):
        check_results(results, BATCH, limits())


@settings(max_examples=examples(300))
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        message = decode(noise)
    except FrameError:
        return
    assert isinstance(message, Batch | Results | RingHeartbeat | StopRing)


@settings(max_examples=examples(400))
@given(at=st.integers(0, 10**6), bits=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_batch_is_refused_or_stays_within_the_limits(at: int, bits: int, cut: bool) -> None:
    payload = bytearray(encode(BATCH))
    at %= len(payload)
    payload[at] ^= bits
    try:
        message = decode(bytes(payload[:at] if cut else payload))
        assert isinstance(message, Batch)
        check_batch(message, limits())
    except (FrameError, AssertionError):
        return
    for entry in message.entries:
        assert all(first >= 0 and first + count <= 16 for first, count in entry.page_table)
        assert 0 <= entry.start < entry.stop <= 60
    assert all(0 <= token < 50 for token in message.token_ids)


@pytest.mark.parametrize("payload", [b"\x82\xa1a" + b"\x91" * 100_000, b"\x81\xa4\xe2yp\xff\x01", b"", b"\xc1"])
def test_what_msgspec_trips_over_is_refused_too(payload: bytes) -> None:
    with pytest.raises(FrameError, match=f"{len(payload)} bytes"):
        decode(payload)


@pytest.mark.parametrize("value", [-1, 2**31, 1.5, "1", True, None])
def test_wrong_types_are_refused(value: object) -> None:
    plain = msgspec.msgpack.decode(encode(BATCH))
    plain["entries"][0]["start"] = value
    with pytest.raises(FrameError):
        decode(msgspec.msgpack.encode(plain))


def test_unknown_fields_are_refused() -> None:
    plain = msgspec.msgpack.decode(encode(BATCH))
    plain["entries"][0]["more"] = 1
    with pytest.raises(FrameError, match="more"):
        decode(msgspec.msgpack.encode(plain))


def test_honest_batches_fit_the_byte_limit() -> None:
    sizes = limits(max_model_len=2000, num_pages=500, max_num_seqs=4)
    history = tuple([49] * 2000)
    sampling = Sampling(history=history, logit_bias=dict.fromkeys(range(50), 1.1), banned=tuple([49] * 256), seed=2**63)
    entries = tuple(BatchEntry(2**30 + i, 1999, 1, 2000, tuple((p, 1) for p in range(500)), sampling) for i in range(4))
    batch = Batch(2**30, entries, (49,) * 4)
    check_batch(batch, sizes)
    assert len(encode(batch)) < sizes.batch_bytes


def test_history_travels_only_where_penalties_read_it() -> None:
    plain = Sequence(0, request("a", 5))
    assert plain.sampling() is PLAIN_GREEDY
    penalised = Sequence(0, request("a", 5, presence_penalty=0.5))
    assert penalised.sampling().history == (1, 2, 3, 4, 5)
    assert penalised.sampling().prompt_length == 5


def test_only_the_last_chunk_is_sampled() -> None:
    sequence = Sequence(0, request("a", 5, prompt_logprobs=1))
    first = sequence.batch_entry(3, ((0, 2),))
    sequence.scheduled = 3
    last = sequence.batch_entry(2, ((0, 2),))
    assert first.sampling is None and last.sampling is not None
    assert first.targets == (2, 3, 4) and last.targets == (5,)
