"""`RateLimits`: what an API key may use. `TokenBucket`: so much in a minute, and as much at once after a pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from tllm.core.errors import ConfigError, nearest

Most = Annotated[int, Meta(ge=1, le=1 << 53)]


class RateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may use; None is without a limit.

    Requests and tokens are those of a minute. `max_concurrent` is how many of its requests are in work at once.
    """

    requests_per_minute: Most | None = None
    tokens_per_minute: Most | None = None
    max_concurrent: Most | None = None

    @classmethod
    def parse(cls, text: str) -> RateLimits:
        """As `--rate-limit` has them: `requests_per_minute=60,tokens_per_minute=20000`. ConfigError for another."""
        values: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in cls.__struct_fields__:
                raise ConfigError(f"there is no limit {name[:50]!r}", nearest(name[:50], cls.__struct_fields__))
            if not number.isascii() or not number.isdigit() or not 1 <= int(number[:17]) <= 1 << 53:
                raise ConfigError(f"{name} is {number[:50]!r}", f"give a whole number: {name}=100")
            if name in values:
                raise ConfigError(f"{name} is said twice", "leave one out")
            values[name] = int(number)
        return cls(**values)

    def or_else(self, defaults: RateLimits) -> RateLimits:
        """These, with the defaults where there is none."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(defaults, **{name: most for name, most in given.items() if most is not None})


UNLIMITED = RateLimits()


class TokenBucket:
    """Holds at most `per_minute`, and is filled at that rate; it begins full. `clock` gives seconds.

    It may be overdrawn, where what was taken turns out to be more than was known. Then it gives nothing until that is
    filled up, so over any time t what is taken is at most `per_minute` (1 + t / 60) and what one overdraft adds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is in it now."""
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + max(0.0, now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    @property
    def seconds_to_full(self) -> float:
        """Until it is full, if nothing is taken."""
        return self.seconds_to(self.per_minute)

    def seconds_to(self, amount: float) -> float:
        """Until so much is in it, if nothing is taken; 0 if it is now. Of more than it holds: until it is full."""
        return max(0.0, min(amount, self.per_minute) - self.level) * 60 / self.per_minute

    def take(self, amount: float) -> None:
        """Take so much, or with a negative amount give it back."""
        self._level = min(float(self.per_minute), self.level - amount)

    def resize(self, per_minute: int) -> None:
        """Hold another amount from now on; what was taken stays taken."""
        self._level = self.level + per_minute - self.per_minute
        self.per_minute = per_minute
