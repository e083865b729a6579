"""`VirtualTokenCounters`: the service that each tenant has had, by which the next one to be served is chosen.

The Virtual Token Counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2. A
tenant is whoever shares the engine with others: on a server, an API key. Each has a counter of the tokens that were
computed for it. The tenant with the least is served next, and one that comes back after a pause is lifted to those that
wait, so that nobody saves up service.

Of two tenants that both have requests waiting, the service differs over any span of time by at most
2 max(PROMPT_COST * L, OUTPUT_COST * M), for prompts of at most L tokens and a cache of M (theorem 4.4). With weights
that holds for service divided by weight, with the bound divided by the least weight. Preemption is not in the proof.
"""

from __future__ import annotations

from collections.abc import Collection

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""What a token costs, as in the paper: prompts are computed many tokens at once, replies one in each step."""

MAX_IDLE_TENANTS = 4096
"""Tenants without a request whose counters are kept. Of more, those with the least service are forgotten: they lose
nothing, as they are lifted when they come back."""


class VirtualTokenCounters:
    """Counters by tenant. `last` is the tenant whose request was the last to leave the queue."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.last = ""

    def arrive(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant with nothing in the queue has a request; `waiting` are those with some."""
        others = [self.counters[name] for name in waiting]
        floor = min(others) if others else self.counters.get(self.last, 0.0)
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
        if len(self.counters) > len(others) + 1 + MAX_IDLE_TENANTS:
            idle = self.counters.keys() - {tenant, self.last, *waiting}
            del self.counters[min(idle, key=lambda name: (self.counters[name], name))]

    def charge(self, tenant: str, cost: float, weight: float) -> None:
        """So much was done for a tenant, whose share is proportional to `weight`."""
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / weight
