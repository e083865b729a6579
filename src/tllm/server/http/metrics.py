"""Prometheus metrics under the names that existing vLLM dashboards ask for, and a few of our own.

`Metrics` is what one server counts: `SequenceMetrics` of what it serves, and `EngineMetrics`, which are read from the
engine when Prometheus asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_RECENT = 10_000
MAX_KEY_LABELS = 100
"""API keys that metrics tell apart."""

_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
# what `EngineClient.stats()` may hold: key -> (exported name, what it is). Other keys come out as tllm_<key>.
_GAUGES = {
    "running": ("vllm:num_requests_running", "Sequences being computed"),
    "waiting": ("vllm:num_requests_waiting", "Sequences waiting for their first step"),
    "plan_gain": ("tllm_plan_gain", "By what part of 1 another plan would serve faster, as machines are now"),
    "page_store_bytes": ("tllm_page_store_bytes", "Bytes of pages on the disk of the driver's rank"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1"),
}
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Sequences set back for want of pages"),
    "drafts": ("vllm:spec_decode_num_drafts", "Times that drafted tokens of a sequence were checked"),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were checked"),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right"),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens of sequences that began, looked up in the prefix cache"),
    "prefix_hits": ("vllm:prefix_cache_hits", "Those of them that were found and not computed"),
    "external_prefix_queries": (
        "vllm:external_prefix_cache_queries",
        "Tokens of sequences that began and were not in the prefix cache, looked up on disk",
    ),
    "external_prefix_hits": ("vllm:external_prefix_cache_hits", "Those of them that were read from disk"),
    "page_store_written_bytes": ("tllm_page_store_written_bytes", "Bytes of pages that the driver's rank has written"),
    "page_store_read_bytes": ("tllm_page_store_read_bytes", "Bytes of pages that the driver's rank has read"),
    "page_store_damaged": ("tllm_page_store_damaged", "Files of pages that were not whole, and were deleted"),
    "page_store_refused": ("tllm_page_store_refused", "Files of pages that the disk did not take"),
    "refused_links": ("tllm_refused_links", "Connections that were shown out, at the control port and at any node's"),
    "refused_frames": ("tllm_refused_frames", "Frames and messages that are not what the plan says, on any wire"),
}
_LABELS = {
    "weights_bytes": ("node", "source"),
    "memory_bytes": ("node",),
    "rss_bytes": ("node",),
    "peak_bytes": ("node",),
}
"""Statistics of several things, told apart by labels: the key is the name and each label's value, as in `a/x/y`."""


class LabelledRegistry:
    """A registry of Prometheus metrics that all have the labels `model_name` and `engine`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}

    def counter(self, name: str, text: str) -> Counter:
        """A counter with these labels alone."""
        return Counter(name, text, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram with these labels alone."""
        made = Histogram(name, text, tuple(self._labels), buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)

    def counters(self, name: str, text: str, *labels: str) -> Counter:
        """Counters told apart by more labels."""
        return Counter(name, text, (*self._labels, *labels), registry=self.registry)

    def gauges(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        """Gauges told apart by more labels, or one without any."""
        return Gauge(name, text, (*self._labels, *labels), registry=self.registry)

    def with_labels(self, **more: str) -> dict[str, str]:
        """These labels and more."""
        return {**self._labels, **more}


@dataclass
class RecentTokens:
    """Numbers of tokens, and latencies in seconds, of some time. Of very many latencies the newest are kept."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    between_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class SequenceMetrics:
    """Tokens and latencies of the sequences that a server serves. A request has one for each prompt and each `n`."""

    def __init__(self, registry: LabelledRegistry) -> None:
        counter, histogram = registry.counter, registry.histogram
        self._registry = registry
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self.recent = RecentTokens()
        self.success = registry.counters("vllm:request_success", "Requests finished", "finished_reason")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", _SHORT)
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", "Between two tokens", _BETWEEN)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a token after the first, by request", _BETWEEN
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token", _LONG)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.request_output = histogram("vllm:request_generation_tokens", "Tokens generated by a request", _TOKENS)

    def finished(self, reason: str) -> None:
        """Count one finished sequence."""
        self.success.labels(**self._registry.with_labels(finished_reason=reason)).inc()

    def began(self, prompt_tokens: int, seconds: float) -> None:
        """A sequence got its first token, so long after it came."""
        self.first_token.observe(seconds)
        self.recent.first_tokens.append(seconds)
        self.processed(prompt_tokens)

    def processed(self, prompt_tokens: int) -> None:
        """So many tokens of a prompt were computed, or found in the cache."""
        self.prompt_tokens.inc(prompt_tokens)
        self.recent.prompt_tokens += prompt_tokens

    def went_on(self, seconds: float) -> None:
        """A sequence got more, so long after what it got before."""
        self.between_tokens.observe(seconds)
        self.recent.between_tokens.append(seconds)

    def generated(self, tokens: int) -> None:
        """A sequence got so many tokens."""
        self.generation_tokens.inc(tokens)
        self.recent.generation_tokens += tokens

    def take_recent(self) -> RecentTokens:
        """What came since this was last called."""
        taken, self.recent = self.recent, RecentTokens()
        return taken


class SequenceTimer:
    """Times one sequence from now until `close`, for `SequenceMetrics`.

    `reason` is why it ended. A sequence that is closed before its end was aborted by the server or the client.
    """

    def __init__(self, metrics: SequenceMetrics, prompt_tokens: int) -> None:
        self.reason = "abort"
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self._computed = 0
        self._metrics = metrics
        self.ended: float | None = None
        self._start = self._first = self._last = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._start

    @property
    def moments(self) -> tuple[float, float, float]:
        """When it began, when its first token came (or it ended, without one), and its end, by `time.monotonic`."""
        ended = time.monotonic() if self.ended is None else self.ended
        return self._start, self._first if self.output_tokens else ended, ended

    @property
    def first_token(self) -> float | None:
        """Seconds until its first token, None where it has none yet."""
        return self._first - self._start if self.output_tokens else None

    def count(self, tokens: int) -> None:
        """So many tokens have come now."""
        if tokens == 0:
            return
        now = time.monotonic()
        if self.output_tokens == 0:
            self._first = now
            self._metrics.began(self.prompt_tokens, now - self._start)
        else:
            self._metrics.went_on(now - self._last)
        self._last = now
        self.output_tokens += tokens
        self._metrics.generated(tokens)

    def computes(self, tokens: int) -> None:
        """So many tokens of the prompt are computed or under way."""
        self._computed = max(self._computed, tokens)

    def pooled(self) -> None:
        """The prompt has come to its numbers: nothing is generated."""
        self.reason = "stop"
        self._metrics.processed(self.prompt_tokens)
        self._metrics.request_prompt.observe(self.prompt_tokens)

    def close(self) -> None:
        """The sequence has ended."""
        self.ended = time.monotonic()
        metrics = self._metrics
        metrics.finished(self.reason)
        if not self.output_tokens and self.reason != "stop":
            metrics.processed(self._computed)  # by which it came to nothing
        if self.output_tokens:
            metrics.whole.observe(self.age)
            metrics.request_prompt.observe(self.prompt_tokens)
            metrics.request_output.observe(self.output_tokens)
        if self.output_tokens > 1:
            metrics.per_token.observe((self._last - self._first) / (self.output_tokens - 1))


class EngineMetrics:
    """What `EngineClient.stats` holds, as metrics that are made when a number is first there."""

    def __init__(self, registry: LabelledRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, tuple[Counter, float]] = {}  # each with the engine's number when it was last read

    def update(self, stats: Mapping[str, float]) -> None:
        """Take over the engine's numbers of this moment."""
        for key in _LABELS.keys() & self._gauges.keys():
            self._gauges[key].clear()  # nodes that are here no more must not show
        for key, value in stats.items():
            if key in _COUNTERS:
                self._raise_to(key, value)
            else:
                self._gauge(key).set(value)

    def _gauge(self, key: str) -> Gauge:
        key, *values = key.split("/")
        labels = _LABELS.get(key, ())
        if key not in self._gauges:
            name, text = _GAUGES.get(key, (f"tllm_{key}", f"Engine statistic {key}"))
            self._gauges[key] = self._registry.gauges(name, text, labels)
        return self._gauges[key].labels(**self._registry.with_labels(**dict(zip(labels, values, strict=True))))

    def _raise_to(self, key: str, value: float) -> None:
        if key not in self._counters:
            self._counters[key] = (self._registry.counter(*_COUNTERS[key]), 0.0)
        counter, before = self._counters[key]
        counter.inc(max(0.0, value - before))
        self._counters[key] = (counter, value)


class KeyMetrics:
    """What each API key was given and refused, by its name. Of very many keys, those seen last are one, `others`."""

    def __init__(self, registry: LabelledRegistry) -> None:
        self._registry = registry
        self._names: set[str] = set()
        self._requests = registry.counters("tllm_key_requests", "Requests admitted, by API key", "key")
        self._prompt = registry.counters("tllm_key_prompt_tokens", "Prompt tokens of each API key", "key")
        self._cached = registry.counters("tllm_key_cached_tokens", "Those of them that were found in the cache", "key")
        self._generated = registry.counters("tllm_key_generation_tokens", "Tokens generated for each API key", "key")
        text = "Requests refused for a key's limit, by key and limit"
        self._refused = registry.counters("tllm_key_refused", text, "key", "limit")
        self._faults = registry.counter("tllm_api_keys_file_faults", "Changed files of keys that were not taken")
        self._is_faulty = registry.gauges("tllm_api_keys_file_is_faulty", "1 while the file of keys is not taken", ())
        self._counted_faults = 0

    def admitted(self, key: str) -> None:
        """A request began."""
        self._requests.labels(**self._of(key)).inc()

    def refused(self, key: str, limit: str) -> None:
        """A request met a limit of its key."""
        self._refused.labels(**self._of(key), limit=limit).inc()

    def used(self, key: str, prompt: int, cached: int, generated: int) -> None:
        """A request is over, and had so many tokens."""
        for counter, tokens in ((self._prompt, prompt), (self._cached, cached), (self._generated, generated)):
            counter.labels(**self._of(key)).inc(tokens)

    def file(self, faults: int, is_faulty: bool) -> None:
        """So many changed files were not taken until now; whether the present one is."""
        self._faults.inc(faults - self._counted_faults)
        self._counted_faults = faults
        self._is_faulty.labels(**self._registry.with_labels()).set(is_faulty)

    def _of(self, key: str) -> dict[str, str]:
        if key not in self._names and len(self._names) >= MAX_KEY_LABELS:
            key = "others"
        self._names.add(key)
        return self._registry.with_labels(key=key)


class Metrics:
    """All metrics of one server. `refused` counts requests without a valid key."""

    def __init__(self, model: str) -> None:
        registry = LabelledRegistry(model)
        self.registry = registry.registry
        self.sequences = SequenceMetrics(registry)
        self.refused = Counter("tllm_auth_failures", "Requests without a valid key", registry=self.registry)
        self.keys = KeyMetrics(registry)
        self.engine = EngineMetrics(registry)
        text = "Tasks of the server's event loop: a few of its own, and those of requests"
        self._tasks = registry.gauges("tllm_tasks", text, ()).labels(**registry.with_labels())

    def render(self, stats: Mapping[str, float], tasks: int = 0) -> bytes:
        """The text that Prometheus reads, with the engine's numbers of this moment and how many tasks there are."""
        self.engine.update(stats)
        self._tasks.set(tasks)
        return generate_latest(self.registry)
