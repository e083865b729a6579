"""`SpanRecorder`: one `StageSpan` for each traced sequence, which sums up what this rank has computed for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tllm.engine.schedule.batch import Batch, BatchEntry
from tllm.spec.request import StageSpan

KEPT_SECONDS = 5.0
"""A record is told for so long after its last turn: several heartbeats."""


class SpanRecorder:
    """The spans of the sequences whose entries have a `trace`. `clock` gives Unix seconds.

    `timing` is for the thread that computes; `spans` may be called from another one.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spans: dict[int, StageSpan] = {}

    @contextmanager
    def timing(self, batch: Batch) -> Iterator[None]:
        """Count a batch, which is computed in the `with` block."""
        traced = [entry for entry in batch.entries if entry.trace]
        if not traced:
            yield
            return
        began = self._clock()
        yield
        ended = self._clock()
        for entry in traced:
            self._add(entry, began, ended)
        for number in [span.trace for span in self._spans.values() if span.ended < ended - KEPT_SECONDS]:
            del self._spans[number]

    def spans(self) -> tuple[StageSpan, ...]:
        """What is known now of those that were computed for of late."""
        since = self._clock() - KEPT_SECONDS
        return tuple(span for span in list(self._spans.values()) if span.ended >= since)

    def _add(self, entry: BatchEntry, began: float, ended: float) -> None:
        before = self._spans.get(entry.trace, StageSpan(entry.trace, began, began, 0, 0, 0.0))
        turns, tokens, seconds = before.turns + 1, before.tokens + entry.count, before.seconds + ended - began
        self._spans[entry.trace] = StageSpan(entry.trace, before.began, ended, turns, tokens, seconds)
