"""Engines that answer from a list, for what stands above the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from tllm.server.openai.engine_client import Health
from tllm.spec.request import FinishReason, Output, Request


class ListedEngine:
    """Answers every request with the same outputs; `requests` are those it was asked for."""

    model_name = "listed"

    def __init__(self, *outputs: Output, max_model_len: int = 64) -> None:
        self.max_model_len = max_model_len
        self.outputs = outputs
        self.requests: list[Request] = []

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        for output in self.outputs:
            yield output

    def stats(self) -> dict[str, float]:
        return {}

    def status(self) -> dict[str, Any]:
        return {}

    def health(self) -> Health:
        return Health()


def out(*ids: int, reason: FinishReason | None = None, **more: Any) -> Output:
    """An output of a few tokens."""
    return Output(request_id="r", token_ids=ids, finish_reason=reason, **more)
