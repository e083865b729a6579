"""An engine for the server's tests: gives the tokens of a script, at a set pace, and remembers every request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from tllm.core.errors import TllmError
from tllm.server.openai.engine_client import Health
from tllm.spec.request import Output, Request, TokenLogprobs
from tllm.text.tokenizer import Tokenizer

Script = Callable[[Request], list[int]]


class FakeEngine:
    """Follows `script`, then ends. Waits for `go_on` after `hold_after` tokens, raises `error` after `fail_after`."""

    def __init__(self, script: Script, eos_id: int = 1, max_model_len: int = 256) -> None:
        self.model_name = "tiny"
        self.max_model_len = max_model_len
        self.script = script
        self.eos_id = eos_id
        self.together = 1  # tokens in one output
        self.delay = 0.0
        self.cached: Script = lambda request: []  # the ids of a prompt that were found in the cache
        self.computed = 0  # tokens of a prompt that are computed before the first comes
        self.hold_after: int | None = None
        self.go_on = asyncio.Event()
        self.fail_after: int | None = None
        self.error: TllmError | None = None
        self.well = Health()
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.running = 0

    @classmethod
    def saying(cls, tokenizer: Tokenizer, text: str, **options: Any) -> FakeEngine:
        """An engine that always says `text`."""
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.eos_id is not None
        return cls(lambda request: ids, tokenizer.eos_id, **options)

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        self.submitted.append(request)
        self.running += 1
        done, given = False, 0
        try:
            for output in self._outputs(request):
                await asyncio.sleep(self.delay)
                if not output.computed_tokens:
                    if self.fail_after is not None and given >= self.fail_after and self.error is not None:
                        done = True
                        raise self.error
                    if self.hold_after is not None and given >= self.hold_after:
                        await self.go_on.wait()
                given += len(output.token_ids)
                done = output.finish_reason is not None
                yield output
        finally:
            self.running -= 1
            if not done:
                self.cancelled.append(request.id)

    def _outputs(self, request: Request) -> list[Output]:
        params = request.params
        outputs = [Output(request_id=request.id, computed_tokens=self.computed)] if self.computed else []
        if request.pooling is not None:
            return [*outputs, Output(request_id=request.id, pooled=self._pooled(request), finish_reason="stop")]
        ids = self.script(request)[: params.max_tokens]
        reason = "length"
        if len(ids) < params.max_tokens and not params.ignore_eos:
            ids, reason = [*ids, self.eos_id], "stop"
        prompt = (
            ()
            if params.prompt_logprobs is None
            else (None, *(self._worth(i, params.prompt_logprobs) for i in request.prompt_ids[1:]))
        )
        for start in range(0, len(ids), self.together):
            some = ids[start : start + self.together]
            last = start + self.together >= len(ids)
            outputs.append(
                Output(
                    request_id=request.id,
                    token_ids=tuple(some),
                    logprobs=() if params.logprobs is None else tuple(self._worth(i, params.logprobs) for i in some),
                    prompt_logprobs=prompt if start == 0 else (),
                    cached_tokens=len(self.cached(request)) if start == 0 else 0,
                    finish_reason=reason if last else None,  # type: ignore[arg-type]
                )
            )
        return outputs

    @staticmethod
    def _pooled(request: Request) -> tuple[float, ...]:
        """How often each of four kinds of ids is in the prompt, or log-probabilities that grow with its length."""
        assert request.pooling is not None
        if request.pooling.kind == "logprobs":
            return tuple(-1.0 - place / len(request.prompt_ids) for place, _ in enumerate(request.pooling.token_ids))
        if request.pooling.kind == "score":
            return (len(request.prompt_ids) / 4,)
        return tuple(float(sum(token_id % 4 == kind for token_id in request.prompt_ids)) for kind in range(4))

    @staticmethod
    def _worth(token_id: int, top: int) -> TokenLogprobs:
        """Even ids are the likeliest at their place, odd ones are second to id 0."""
        own = -0.1 - token_id / 1000
        ranked = [(token_id, own), (0, own - 1)] if token_id % 2 == 0 else [(0, own + 0.05), (token_id, own)]
        ranked += [(other, -50.0 - other) for other in range(1, 21)]
        return TokenLogprobs(token_id, own, tuple(ranked[:top]), 1 + token_id % 2)

    def stats(self) -> Mapping[str, float]:
        return {"running": float(self.running), "waiting": 0.0, "kv_usage": 0.25, "preemptions": 2.0, "links": 3.0}

    def status(self) -> Mapping[str, Any]:
        return {"nodes": [{"node": "a", "rank": None, "layers": [0, 4]}]}

    def health(self) -> Health:
        return self.well
