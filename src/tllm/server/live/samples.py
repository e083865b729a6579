"""What the last minutes of a server were like: a `Sample` each second, a `ClusterEvent` for each thing that happened.

The names of the fields are those of the reply of `GET /v1/cluster/live`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

KEPT_SAMPLES = 600
"""Ten minutes."""
KEPT_EVENTS = 200

Severity = Literal["info", "warning", "error"]


class LatencySummary(msgspec.Struct, frozen=True):
    """Some latencies, in seconds."""

    count: int
    median: float
    p95: float
    max: float

    @classmethod
    def of(cls, seconds: Collection[float]) -> LatencySummary | None:
        """The summary of these; None where there are none. Percentiles are latencies that did occur (nearest rank)."""
        if not seconds:
            return None
        ranked = sorted(seconds)
        median, p95 = (ranked[math.ceil(part * len(ranked)) - 1] for part in (0.5, 0.95))
        return cls(len(ranked), median, p95, ranked[-1])


class NodeSample(msgspec.Struct, frozen=True):
    """What one node did since the sample before.

    `busy` is the part of the time in which it computed, from 0 to 1; `step` the mean seconds that it computed for a
    batch of replies, None where it had no such batch; `rss_bytes` the memory that its process holds.
    """

    busy: float
    step: float | None
    rss_bytes: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One second. Numbers of tokens and bytes are those since the sample before; the others are of its moment."""

    number: int
    """Counts the samples of this server's run."""
    time: float
    """Unix time."""
    seconds: float
    """Since the sample before."""
    epoch: int
    """Of the cluster; grows with each change of its plan or its nodes."""
    running: int
    """Sequences that are computed."""
    waiting: int
    """Sequences that wait for their first step."""
    kv_usage: float
    """Part of the KV pages that is in use, 0 to 1."""
    prompt_tokens: int
    """Tokens of prompts whose first token has come or that were pooled, and what was computed of those that ended
    before."""
    generation_tokens: int
    """Tokens generated."""
    time_to_first_token: LatencySummary | None
    """Of the sequences that got their first token."""
    inter_token_latency: LatencySummary | None
    """Between two outputs of a sequence."""
    time_to_answer: LatencySummary | None
    """Of the prompts that were pooled (embeddings, scores)."""
    nodes: dict[str, NodeSample]
    """By name, those that have a rank."""
    links: dict[str, int]
    """Bytes over each link, by its ranks as in `0>1`."""


class ClusterEvent(msgspec.Struct, frozen=True):
    """One thing that happened to the cluster."""

    number: int
    time: float
    """Unix time."""
    severity: Severity
    text: str
    """For people."""


class OpenSequence(msgspec.Struct, frozen=True):
    """One sequence in hand. What it says is nobody else's business, and not here."""

    id: str
    age: float
    """Seconds since it came."""
    prompt_tokens: int
    output_tokens: int
    first_token: float | None
    """Seconds from its coming to its first token."""


class Numbered(Protocol):
    """Whatever has a number."""

    @property
    def number(self) -> int: ...


_T = TypeVar("_T", bound=Numbered)


class NumberedLog(Generic[_T]):
    """The newest of a growing row of numbered items; the oldest are dropped."""

    def __init__(self, most: int) -> None:
        self._items: deque[_T] = deque(maxlen=most)
        self.next_number = 0

    def append(self, item: _T) -> None:
        """Add the item with `next_number`."""
        assert item.number == self.next_number, "items are numbered one after another"
        self._items.append(item)
        self.next_number += 1

    def after(self, number: int) -> list[_T]:
        """The items that are kept and newer than this number, oldest first."""
        return [item for item in self._items if item.number > number]


def bytes_of_links(nodes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes that crossed each link so far, as the end that knows more of it last reported; by the links' ranks."""
    moved: dict[str, int] = {}
    for node in nodes:
        for link, count in node.get("links", {}).items():
            moved[link] = max(count, moved.get(link, 0))
    return moved
