"""`LiveRecorder`: looks at a server each second, and keeps what the page and `tllm top` show of its last minutes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tllm.server.live.cluster_events import happenings
from tllm.server.live.samples import (
    KEPT_EVENTS,
    KEPT_SAMPLES,
    ClusterEvent,
    LatencySummary,
    NodeSample,
    NumberedLog,
    OpenSequence,
    Sample,
    bytes_of_links,
)
from tllm.server.openai.engine_client import EngineClient, RequestRouter

SECONDS = 1.0
"""Between two samples. Nodes send their numbers every half second."""


class LiveReport(msgspec.Struct, frozen=True):
    """The reply of `GET /v1/cluster/live`."""

    run: str
    """Another one each time that the server is started: numbers begin anew."""
    now: float
    """Unix time of the server, which other machines' clocks may differ from."""
    samples: list[Sample]
    events: list[ClusterEvent]
    sequences: list[OpenSequence]
    """Those in hand, the oldest first."""
    waits_for: str
    """The node that what runs waits for at this moment, "" where nothing runs."""
    seconds_since_step: float
    """Since any step of any kind was done; 0 where nothing runs."""


class _Totals(msgspec.Struct):
    """Counters as they were at the last sample."""

    at: float
    nodes: dict[str, Mapping[str, float]] = {}
    links: dict[str, int] = {}


class LiveRecorder:
    """What `router` and its engine say, each second. The engine's counters begin anew with each epoch."""

    def __init__(self, router: RequestRouter, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._clock = clock
        self._run = uuid.uuid4().hex
        self._samples = NumberedLog[Sample](KEPT_SAMPLES)
        self._events = NumberedLog[ClusterEvent](KEPT_EVENTS)
        self._status: Mapping[str, Any] = {}
        self._totals = _Totals(clock())

    async def run(self) -> None:
        """Take a sample each second, until this is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SECONDS)

    def sample(self) -> None:
        """Look now."""
        client, now = self._router.client, time.time()
        status = client.status()
        for severity, text in happenings(self._status, status):
            self._events.append(ClusterEvent(self._events.next_number, now, severity, text))
        is_same_epoch = status.get("epoch", 0) == self._status.get("epoch", 0)
        self._status = status
        self._samples.append(self._sample(client, status, now, is_same_epoch))

    def report(self, after: int, events_after: int) -> LiveReport:
        """The samples and events with higher numbers than these, and what is in hand at this moment."""
        health = self._router.client.health()
        return LiveReport(
            run=self._run,
            now=time.time(),
            samples=self._samples.after(after),
            events=self._events.after(events_after),
            sequences=[
                OpenSequence(id, timer.age, timer.prompt_tokens, timer.output_tokens, timer.first_token)
                for id, timer in self._router.open.items()
            ],
            waits_for=health.waits_for,
            seconds_since_step=health.seconds_since_step if health.running else 0.0,
        )

    def _sample(self, client: EngineClient, status: Mapping[str, Any], now: float, is_same_epoch: bool) -> Sample:
        stats, recent = client.stats(), self._router.metrics.sequences.take_recent()
        old, at = self._totals, self._clock()
        seconds = max(at - old.at, 1e-6)
        nodes = {node["node"]: node for node in status.get("nodes", ()) if node.get("rank") is not None}
        links = bytes_of_links(nodes.values())
        self._totals = _Totals(at, {name: node.get("stats", {}) for name, node in nodes.items()}, links)
        return Sample(
            number=self._samples.next_number,
            time=now,
            seconds=seconds,
            epoch=status.get("epoch", 0),
            running=int(stats.get("running", 0)),
            waiting=int(stats.get("waiting", 0)),
            kv_usage=stats.get("kv_usage", 0.0),
            prompt_tokens=recent.prompt_tokens,
            generation_tokens=recent.generation_tokens,
            time_to_first_token=LatencySummary.of(recent.first_tokens),
            inter_token_latency=LatencySummary.of(recent.between_tokens),
            time_to_answer=LatencySummary.of(recent.answers),
            nodes={
                name: _of_node(node, old.nodes.get(name, {}) if is_same_epoch else {}, seconds)
                for name, node in nodes.items()
            },
            links={
                link: max(0, count - (old.links.get(link, 0) if is_same_epoch else 0)) for link, count in links.items()
            },
        )


def _of_node(node: Mapping[str, Any], old: Mapping[str, float], seconds: float) -> NodeSample:
    stats = node.get("stats", {})
    computed, replies, batches = (
        max(0.0, stats.get(key, 0.0) - old.get(key, 0.0))
        for key in ("compute_seconds", "reply_seconds", "reply_batches")
    )
    return NodeSample(
        busy=min(1.0, computed / seconds),
        step=replies / batches if batches else None,
        rss_bytes=node.get("rss_bytes", 0),
    )
