"""`RequestTrace`: when what happened to one HTTP request, for its trace. Texts are not in it."""

from __future__ import annotations

import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tllm.server.http.metrics import SequenceTimer
from tllm.spec.request import Request


class TracedSequence(NamedTuple):
    """One choice of a reply: what the engine was asked, and its times."""

    request: Request
    timer: SequenceTimer


@dataclass
class RequestTrace:
    """One request of a client. `began` and `ended` are Unix nanoseconds.

    `parent` are the headers by which the caller says what its own span is (W3C Trace Context).
    """

    method: str
    route: str
    parent: dict[str, str]
    began: int = field(default_factory=time.time_ns)
    ended: int = 0
    status: int = 0
    sequences: list[TracedSequence] = field(default_factory=list)
    _ahead: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def nanoseconds(self, monotonic: float) -> int:
        """Unix nanoseconds of a moment by `time.monotonic`."""
        return int(monotonic * 1e9) + self._ahead

    def end(self) -> None:
        """It is answered, or its client is gone."""
        self.ended = time.time_ns()

    @property
    def is_over(self) -> bool:
        """Whether it is answered, and the engine has ended all that it was asked: a kept reply outlives its request."""
        return self.ended > 0 and all(sequence.timer.ended is not None for sequence in self.sequences)


CURRENT: ContextVar[RequestTrace | None] = ContextVar("CURRENT", default=None)
"""The trace of the request that this task works for."""


def traced(request: Request, timer: SequenceTimer) -> Request:
    """The engine's request, known to every rank by a number if its HTTP request is traced."""
    trace = CURRENT.get()
    if trace is None:
        return request
    numbered = msgspec.structs.replace(request, trace=1 + secrets.randbelow(2**31 - 1))
    trace.sequences.append(TracedSequence(numbered, timer))
    return numbered
