"""One reply as it comes: its text as soon as it is final, its tokens, how long they took."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from tllm.core.errors import ClusterError
from tllm.server.openai.choice import ChoiceOptions, ReplyChoice
from tllm.spec.request import Request, TokenLogprobs
from tllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tllm.server.openai.engine_client import EngineClient


class StreamedReply:
    """What has come of one request. Without a tokenizer its text stays empty."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        wants_logprobs = request.params.logprobs is not None
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self._choice = ReplyChoice(0, request, tokenizer, ChoiceOptions(tuple(stops), logprobs=wants_logprobs))
        self._asked = self._first = self._last = 0.0

    @property
    def finish_reason(self) -> str | None:
        return self._choice.finish_reason

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache and not computed."""
        return self._choice.cached_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from asking to the first token."""
        return self._first - self._asked

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first: how fast it goes on. 0 where there is no second token."""
        spent = self._last - self._first
        return (len(self.token_ids) - 1) / spent if spent > 0 else 0.0

    async def stream(self, client: EngineClient) -> AsyncGenerator[str]:
        """Submit the request and yield its text. A stop string ends it, and the engine's work for it."""
        self._asked = time.perf_counter()
        async with aclosing(client.submit(self.request)) as outputs:
            async for output in outputs:
                if output.computed_tokens:  # it has nothing else
                    continue
                if output.finish_reason in ("error", "cancelled"):
                    raise ClusterError(output.error or f"the engine ended the request: {output.finish_reason}")
                if output.token_ids:
                    self._last = time.perf_counter()
                    self._first = self._first or self._last
                step = self._choice.read(output)
                self.token_ids += step.token_ids
                self.logprobs += [one.logprobs for one in step.scored if one.logprobs is not None]
                self.text += step.text
                yield step.text
                if self.finish_reason is not None:
                    return
        raise ClusterError("the engine ended the request without a reason")
