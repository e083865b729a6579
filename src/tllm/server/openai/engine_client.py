"""Between the routes and the engine: what an engine must offer, how many sequences may be in hand, what is measured."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import msgspec

from tllm.core.errors import TllmError
from tllm.server.http.errors import HttpError, draining, overloaded
from tllm.server.http.metrics import Metrics
from tllm.server.openai.choice import ChoiceProgress, ReplyChoice
from tllm.spec.request import Output, Request


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is. `node` and `reason` say who and what is at fault where something is.

    `waits_for`: the node that what runs waits for, though nothing may be wrong with it.
    """

    alive: bool = True
    ready: bool = True
    running: int = 0
    seconds_since_step: float = 0.0  # since any step of any kind was done; counts only while something runs
    node: str = ""
    reason: str = ""
    waits_for: str = ""


class EngineClient(Protocol):
    """What the server needs of an engine, wherever it runs.

    `submit` gives the request's tokens as they come; closing it cancels the request. It raises `RequestError` where
    the request cannot be served as written and `ClusterError` where a node was lost. `stats` may hold running, waiting,
    kv_usage, preemptions, prefix_queries, prefix_hits and more.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def submit(self, request: Request) -> AsyncGenerator[Output, None]: ...

    def stats(self) -> Mapping[str, float]: ...

    def status(self) -> Mapping[str, Any]: ...

    def health(self) -> Health: ...


class RequestRouter:
    """Hands requests to the engine, refuses what is too much, and measures."""

    def __init__(self, client: EngineClient, metrics: Metrics, max_sequences: int) -> None:
        self.client = client
        self.metrics = metrics
        self.max_sequences = max_sequences
        self.in_hand = 0
        self.draining = False

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Room for `count` sequences, given back at the end; `HttpError` 429 or 503 where there is none."""
        if self.draining:
            raise draining()
        if count > self.max_sequences:
            message = f"the request asks for {count} sequences, at most {self.max_sequences} are taken at once"
            raise HttpError(400, message, code="too_many_sequences")
        if self.in_hand + count > self.max_sequences:
            raise overloaded(f"{self.in_hand} sequences are in hand and {self.max_sequences} the most")
        self.in_hand += count
        try:
            yield
        finally:
            self.in_hand -= count

    async def play(self, choice: ReplyChoice) -> AsyncGenerator[ChoiceProgress, None]:
        """Run one choice to its end. Closing this cancels its sequence; an engine's error is raised."""
        watch = _Watch(self.metrics, len(choice.request.prompt_ids))
        try:
            async with aclosing(self.client.submit(choice.request)) as outputs:
                async for output in outputs:
                    if output.finish_reason in ("error", "cancelled"):
                        reason = output.error or f"the engine ended the request: {output.finish_reason}"
                        raise HttpError(500, reason, "server_error", f"engine_{output.finish_reason}")
                    watch.saw(len(output.token_ids))
                    step = choice.read(output)
                    watch.reason = choice.finish_reason or watch.reason
                    yield step
                    if choice.finish_reason is not None:
                        return
            raise HttpError(500, "the engine ended the request without a reason", "server_error", "engine_error")
        except TllmError:
            watch.reason = "error"
            raise
        finally:
            watch.close()


class _Watch:
    """Times of one sequence; a sequence that is closed before its end was stopped by the server or the client."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self.reason = "abort"
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._start = self._first = self._last = time.monotonic()

    def saw(self, tokens: int) -> None:
        if tokens == 0:
            return
        now = time.monotonic()
        if self._tokens == 0:
            self._first = now
            self._metrics.first_token.observe(now - self._start)
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
        else:
            self._metrics.between_tokens.observe(now - self._last)
        self._last = now
        self._tokens += tokens
        self._metrics.generation_tokens.inc(tokens)

    def close(self) -> None:
        metrics = self._metrics
        metrics.finished(self.reason)
        if self._tokens:
            metrics.whole.observe(time.monotonic() - self._start)
            metrics.request_prompt.observe(self._prompt_tokens)
            metrics.request_output.observe(self._tokens)
        if self._tokens > 1:
            metrics.per_token.observe((self._last - self._first) / (self._tokens - 1))
