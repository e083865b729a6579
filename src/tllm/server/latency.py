"""`TimedEngine`: an engine that keeps the times of its requests, to be compared with what was predicted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tllm.server.openai.engine_client import EngineClient, Health
from tllm.spec.request import Output, Request


@dataclass
class RequestTimes:
    """One request that was answered: when it came, and when its first and last token did, in `time.monotonic` seconds;
    or when its prompt was pooled, without tokens.

    `prompt` and `tokens` are numbers of tokens, in and out; `cached` of the prompt were found and not computed.
    """

    prompt: int
    came: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    cached: int = 0


KEPT = 1000
"""Requests whose times are kept; of more, the newest."""


class TimedEngine:
    """Passes everything to the engine `client`; `times` are those of the replies that have ended, `pooled` those of
    the prompts that were pooled."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.times: deque[RequestTimes] = deque(maxlen=KEPT)
        self.pooled: deque[RequestTimes] = deque(maxlen=KEPT)

    @property
    def model_name(self) -> str:
        return self._client.model_name

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs as they come."""
        times = RequestTimes(len(request.prompt_ids), time.monotonic())
        try:
            async with aclosing(self._client.submit(request)) as outputs:
                async for output in outputs:
                    if output.token_ids or output.pooled:
                        times.last = time.monotonic()
                        times.first = times.first or times.last
                        times.tokens += len(output.token_ids)
                        times.cached += output.cached_tokens
                    yield output
        finally:
            if times.last:
                (self.times if times.tokens else self.pooled).append(times)

    def stats(self) -> Mapping[str, float]:
        return self._client.stats()

    def status(self) -> Mapping[str, Any]:
        return self._client.status()

    def health(self) -> Health:
        return self._client.health()
