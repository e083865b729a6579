"""`Account`: what one API key has used, against what it may use. `Charge`: one request on it.

A request costs tokens: those of its prompt that are not found in the prefix cache, and those that are generated.
Neither is known when it comes. So it is charged at admission with the whole prompt, and for the reply with what this
key's replies took before, or `max_tokens` where that is less. A reply that gets longer is charged as it grows, and at
the end the charge is corrected to what it was: of a request that is cancelled before its first token, what was computed
of its prompt. So a bucket can be overdrawn by replies that are longer than expected, and then nothing more is admitted
until that is made up: over a longer time no key gets more than its rate. What the server lost before any of it was
written costs no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tllm.core.errors import counted
from tllm.server.admission.token_bucket import UNLIMITED, RateLimits, TokenBucket

FIRST_REPLY_TOKENS = 256.0
"""What a key's replies are taken to have until some were seen."""

NEW_REPLY_WEIGHT = 0.1
"""Of each new reply in the moving averages of tokens and seconds."""


@dataclass(frozen=True)
class ApiKey:
    """A key, by the SHA-256 of its text, and what its holder may do. `priority`: none more urgent is given to it."""

    name: str
    digest: bytes = field(repr=False)
    limits: RateLimits = UNLIMITED
    priority: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Refusal:
    """Why a key gets nothing now. After `seconds` it may; None: never, as the request is larger than the limit."""

    limit: str
    message: str
    seconds: float | None


@dataclass
class Charge:
    """What a request was charged with, in tokens, and what it has used so far; the bucket follows.

    `computed` are tokens of its prompts that were computed before anything was generated, by the ids of the engine's
    requests. `is_written`: whether its client is given the reply as it grows, and has some of it.
    """

    bucket: TokenBucket | None
    prompt_tokens: int
    taken: float
    generated: int = 0
    cached: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    has_begun: bool = False
    is_written: bool = False

    def use(self, generated: int, cached: int) -> None:
        """So many tokens in all have been generated, and so many of the prompt were found in the cache."""
        self.has_begun, self.generated, self.cached = True, generated, cached
        self._settle(max(self.taken, self.used))

    def compute(self, request_id: str, tokens: int) -> None:
        """So many tokens of a prompt are computed or under way, which counts though nothing may come of them."""
        self.computed[request_id] = max(tokens, self.computed.get(request_id, 0))

    @property
    def used(self) -> int:
        """Tokens that count. Before the first is generated, those of prompts that were computed."""
        return self.prompt_tokens - self.cached + self.generated if self.has_begun else self.computed_only

    @property
    def computed_only(self) -> int:
        """Tokens of prompts that were computed and of which nothing came. Choices of one prompt count it once."""
        return 0 if self.has_begun else min(sum(self.computed.values()), self.prompt_tokens)

    def lost(self) -> None:
        """The server failed: what it has not written costs nothing, and what it has written stays."""
        self.has_begun = self.has_begun and self.is_written
        self.computed.clear()

    def close(self) -> None:
        """It is over: the charge becomes what was used."""
        self._settle(self.used)

    def _settle(self, amount: float) -> None:
        if self.bucket is not None:
            self.bucket.take(amount - self.taken)
        self.taken = amount


class Account:
    """One key and its use. `sequences` are those in hand of all its requests, `concurrent` the requests in work."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self.sequences = self.concurrent = 0
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._reply_tokens, self._request_seconds = FIRST_REPLY_TOKENS, 1.0
        self.change(key)

    def change(self, key: ApiKey) -> None:
        """Take other limits from now on; what was used stays used."""
        self.key = key
        self._requests = self._resized(self._requests, key.limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, key.limits.tokens_per_minute)

    def refusal(self, prompt_tokens: int = 0, max_tokens: int = 0) -> Refusal | None:
        """Why a request of this size gets nothing now, if so. Where its prompt is not read yet, why none of any size
        does; it is told to come again when there is enough for what replies have taken so far."""
        limits, name = self.key.limits, self.key.name
        if limits.max_concurrent is not None and self.concurrent >= limits.max_concurrent:
            key = f"of the key {name}"
            now = counted(self.concurrent, f"request {key} is", f"requests {key} are")
            message = f"{now} in work, and {limits.max_concurrent} the most"
            return Refusal("max_concurrent", message, self._request_seconds / limits.max_concurrent)
        if self._requests is not None and self._requests.level < 1:
            message = (
                f"the key {name} may send {counted(self._requests.per_minute, 'request')} per minute, and has sent them"
            )
            return Refusal("requests_per_minute", message, self._requests.seconds_to(1))
        return self._token_refusal(prompt_tokens, max_tokens)

    def _token_refusal(self, prompt_tokens: int, max_tokens: int) -> Refusal | None:
        bucket = self._tokens
        if bucket is None:
            return None
        most, left = bucket.per_minute, math.floor(bucket.level)
        may = f"the key {self.key.name} may use {most} tokens per minute"
        if prompt_tokens > most:
            return Refusal("tokens_per_minute", f"{may}, and the prompt has {prompt_tokens}", None)
        # A request that is expected to take more than the whole bucket waits until that is full.
        needed = min(max(1.0, self._expected(prompt_tokens, max_tokens)), most)
        if bucket.level >= (needed if prompt_tokens else 1):
            return None
        message = f"{may}; {left} are left and about {math.ceil(needed)} needed"
        return Refusal("tokens_per_minute", message, bucket.seconds_to(needed))

    @contextmanager
    def charged(self, count: int, prompt_tokens: int, max_tokens: int) -> Iterator[Charge]:
        """A request of `count` sequences in work, after `refusal` said nothing; the block says what it uses."""
        charge = Charge(self._tokens, prompt_tokens, self._expected(prompt_tokens, max_tokens))
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is not None:
            self._tokens.take(charge.taken)
        began = self._clock()
        self.sequences, self.concurrent = self.sequences + count, self.concurrent + 1
        try:
            yield charge
        finally:
            self.sequences, self.concurrent = self.sequences - count, self.concurrent - 1
            charge.close()
            if charge.has_begun:
                if charge.generated:  # an embedding is no reply
                    self._reply_tokens += NEW_REPLY_WEIGHT * (charge.generated - self._reply_tokens)
                self._request_seconds += NEW_REPLY_WEIGHT * (self._clock() - began - self._request_seconds)

    def headers(self) -> dict[str, str]:
        """What is left, under the names that OpenAI's servers use; none where nothing is limited."""
        made = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                made[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                made[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                made[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_to_full)
        return made

    def _expected(self, prompt_tokens: int, max_tokens: int) -> float:
        return prompt_tokens + min(max_tokens, self._reply_tokens)

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None or bucket is None:
            return None if per_minute is None else TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket


def duration(seconds: float) -> str:
    """As OpenAI writes it: 12ms, 6.1s, 1m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
