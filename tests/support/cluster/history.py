"""What happened in a run under a fault, in order, and whether all of that may happen: `faults_in` says what may not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TYPED = ("node_lost", "engine_dead", "draining")
"""Codes of errors that say what became of a request."""


@dataclass(frozen=True)
class Event:
    """Something that was seen `at` so many seconds after the history began."""

    at: float
    what: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]


class History:
    """Events as several threads see them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def add(self, what: str, **facts: Any) -> Event:
        with self._lock:
            event = Event(time.monotonic() - self._start, what, facts)
            self.events.append(event)
        return event

    def of(self, what: str, after: float = 0.0, **facts: Any) -> list[Event]:
        """The events of a kind since some time that have these facts."""
        with self._lock:
            found = list(self.events)
        wanted = facts.items()
        return [e for e in found if e.what == what and e.at >= after and all(e.facts.get(k) == v for k, v in wanted)]

    def write(self, file: Path) -> None:
        """One JSON line for each event."""
        lines = (json.dumps({"at": round(e.at, 4), "what": e.what, **e.facts}) for e in self.events)
        file.write_text("".join(line + "\n" for line in lines))


def ids_of(history: History, stream: int) -> list[int]:
    """All tokens that a stream has given out."""
    return [token for event in history.of("tokens", stream=stream) for token in event["ids"]]


def faults_in(history: History, golden: Sequence[Sequence[int]], bound: float, blamed: Sequence[str]) -> list[str]:
    """What is wrong with the streams of a history, whose true tokens are `golden`; nothing where all is as it must be.

    Each ends within `bound` seconds of the fault with its own tokens and nothing else, or in one typed error that
    names one of the nodes `blamed`, its tokens so far being the first of its own.
    """
    (fault,) = history.of("fault")
    wrong = []
    for asked in history.of("asked"):
        stream = asked["stream"]
        ids, want = ids_of(history, stream), list(golden[asked["question"]])
        ends = history.of("ended", stream=stream) + history.of("error", stream=stream)
        late = [event.at for event in history.of("tokens", stream=stream) if ends and event.at > ends[0].at]
        if len(ends) != 1 or late:
            wrong.append(f"stream {stream} has {len(ends)} ends and tokens after the first at {late}")
            continue
        (end,) = ends
        if end.at - max(fault.at, asked.at) > bound:
            wrong.append(
                f"stream {stream} took {end.at - max(fault.at, asked.at):.1f} s, at most {bound:g} are allowed"
            )
        if end.what == "ended" and ids != want:
            wrong.append(f"stream {stream} gave {ids}, and its tokens are {want}")
        if end.what == "error":
            wrong += [f"stream {stream} {fault}" for fault in _error_faults(end, ids, want, blamed)]
    return wrong


def _error_faults(end: Event, ids: list[int], want: list[int], blamed: Sequence[str]) -> list[str]:
    wrong = []
    if ids != want[: len(ids)]:
        wrong.append(f"gave {ids} before its error, and its tokens are {want}")
    if end["code"] not in TYPED:
        wrong.append(f"ended with {end['code']}: {end['message']}")
    if not any(node in end["message"] for node in blamed):
        wrong.append(f"has an error that names none of {', '.join(blamed)}: {end['message']}")
    return wrong
