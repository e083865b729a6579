"""Failures of a long run: how much of its time is useful, and after how much work to save.

Nodes fail one as likely as another at any time, so that one of N fails every M = (mean time of one) / N seconds. A run
works for t seconds, saves for d, and goes on. A failure throws away what is not saved and costs a restart of R, in
which it may fail again. From a save to the next it then takes, on an average (Daly, 2006, equation 20),

    M exp(R / M) (exp((t + d) / M) - 1)

The best t solves exp(-(t + d) / M) = 1 - t / M. Young, 1974: about sqrt(2 d M). Daly, 2006: a series of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tllm.core.errors import ConfigError

HALVINGS = 200
"""Of an interval of doubles: more than any has."""


@dataclass(frozen=True)
class Failures:
    """What is known of failures, in seconds: the mean `between` two of one node, how long a `save` keeps the run
    waiting, and how long it takes from a failure to the work that was saved (`restart`)."""

    between: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        for name, least in (("between", "more than 0"), ("save", "more than 0"), ("restart", "0 or more")):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (value == 0 and name != "restart"):
                raise ConfigError(f"{name} of [failures] is {value:g} seconds", f"give {least}")

    def mean(self, nodes: int) -> float:
        """Seconds between two failures of any of so many nodes."""
        return self.between / nodes

    def useful(self, nodes: int, interval: float) -> float:
        """The share of the time that is work which lasts, when a save follows every `interval` seconds of work."""
        mean = self.mean(nodes)
        exponent = (interval + self.save) / mean
        if exponent + self.restart / mean > math.log(1e300):
            return 0.0
        return interval / (mean * math.exp(self.restart / mean) * math.expm1(exponent))

    def best(self, nodes: int) -> float:
        """The interval with the largest useful share, by halving: 1 - t / M - exp(-(t + d) / M) falls from 0 to M."""
        mean = self.mean(nodes)
        low, high = 0.0, 1.0  # of M
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if -math.expm1(-middle - self.save / mean) > middle:
                low = middle
            else:
                high = middle
        return low * mean
