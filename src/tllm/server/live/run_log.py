"""`RunLog`: the newest steps of a training run, and what happened in it, for the page that follows it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tllm.server.live.samples import KEPT_EVENTS, ClusterEvent, NumberedLog, Severity

KEPT_STEPS = 5000


class RunSample(msgspec.Struct, frozen=True):
    """One step that was done."""

    number: int
    """Counts the steps that this command was told of; a step that is taken again after a loss counts again."""
    time: float
    """Unix time at which it was done."""
    record: Mapping[str, Any]
    """As a line of metrics.jsonl has it."""
    completions: Sequence[Mapping[str, Any]] = ()
    """As lines of eval_completions.jsonl have them, after an evaluation."""


class RunReport(msgspec.Struct, frozen=True):
    """The reply of `GET /v1/training/live`."""

    run: str
    """Another one each time that the command is started: numbers begin anew."""
    now: float
    """Unix time of the server."""
    samples: list[RunSample]
    events: list[ClusterEvent]


class RunLog:
    """Whoever follows the run tells it of steps and events."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex
        self._samples = NumberedLog[RunSample](KEPT_STEPS)
        self._events = NumberedLog[ClusterEvent](KEPT_EVENTS)

    def stepped(self, record: Mapping[str, Any], completions: Sequence[Mapping[str, Any]] = ()) -> None:
        """A step is done, and these completions of rows held out are to be read."""
        self._samples.append(RunSample(self._samples.next_number, time.time(), record, completions))

    def told(self, severity: Severity, text: str) -> None:
        """Something happened."""
        self._events.append(ClusterEvent(self._events.next_number, time.time(), severity, text))

    def report(self, after: int, events_after: int) -> RunReport:
        """The steps and events with higher numbers than these."""
        return RunReport(self._run, time.time(), self._samples.after(after), self._events.after(events_after))
