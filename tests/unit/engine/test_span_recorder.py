"""What a rank tells of sequences that are traced."""

from __future__ import annotations

from tllm.engine.schedule.batch import Batch, BatchEntry, decode, encode
from tllm.engine.span_recorder import KEPT_SECONDS, SpanRecorder
from tllm.spec.request import StageSpan


def batch(*entries: tuple[int, int]) -> Batch:
    """A batch of entries (trace, tokens)."""
    made = tuple(BatchEntry(i, 0, count, count, ((0, 1),), trace=trace) for i, (trace, count) in enumerate(entries))
    return Batch(0, made, (0,) * sum(count for _, count in entries))


def test_batches_without_a_trace_are_not_timed() -> None:
    def never() -> float:
        raise AssertionError("a clock was read")

    with SpanRecorder(never).timing(batch((0, 3))):
        pass


def test_a_record_is_told_for_a_while_after_its_last_turn() -> None:
    now = [100.0]
    work = SpanRecorder(lambda: now[0])
    with work.timing(batch((7, 5))):
        now[0] += 2.0
    with work.timing(batch((7, 1), (9, 1))):
        now[0] += 1.0
    assert work.spans() == (StageSpan(7, 100.0, 103.0, 2, 6, 3.0), StageSpan(9, 102.0, 103.0, 1, 1, 1.0))
    now[0] += KEPT_SECONDS
    assert len(work.spans()) == 2
    now[0] += 0.1
    assert work.spans() == ()
    with work.timing(batch((7, 1))):
        now[0] += 1.0
    assert [span.trace for span in work.spans()] == [7], "and the other is forgotten"


def test_an_entry_without_a_trace_is_as_long_as_before() -> None:
    plain, traced = encode(batch((0, 1))), encode(batch((7, 1)))
    assert b"trace" not in plain and decode(traced) == batch((7, 1))
