"""Tenants on one scheduler, in virtual time (a step is a tick): their service stays within the bound proved of VTC."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping

import pytest

from tests.unit.engine.kits import FakeRing, expected, limits, request
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.waiting.fair_share import OUTPUT_COST, PROMPT_COST
from tllm.spec.request import Request, Scheduling

STEPS = 1500
SEQUENCES, LONGEST_PROMPT, LONGEST_REPLY = 4, 12, 16
PAGES = 64
"""Of four tokens each, enough for all that runs: nothing is preempted, as the theorem knows no preemption."""


def asked(name: str, tenant: str, prompt: int, max_tokens: int, weight: float = 1.0) -> Request:
    made = request(name, [hash_free(name, place) for place in range(prompt)], max_tokens)
    scheduling = Scheduling(tenant=tenant, weight=weight)
    return Request(id=name, prompt_ids=made.prompt_ids, params=made.params, scheduling=scheduling)


def hash_free(name: str, place: int) -> int:
    """A token that differs from name to name, so that no prefix is shared."""
    return (sum(name.encode()) * 31 + place * 7) % 50


class Served:
    """A scheduler whose tenants always have requests waiting; `service` is each one's, after each step."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]], weights: Mapping[str, float], depth: int) -> None:
        self.scheduler = Scheduler(limits(num_pages=PAGES, max_num_seqs=SEQUENCES, enable_prefix_caching=False), depth)
        self.ring = FakeRing(self.scheduler)
        self.sizes, self.weights = sizes, weights
        self.dice = random.Random("requests")
        self.made: dict[str, Request] = {}
        self.service: list[dict[str, float]] = []
        self._sum: dict[str, float] = defaultdict(float)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for tenant in self.sizes:
                while sum(one.request.scheduling.tenant == tenant for one in self.scheduler.waiting) <= SEQUENCES:
                    self._ask(tenant)
            waited = {sequence.request.id for sequence in self.scheduler.waiting}
            outputs = self.ring.step()
            for name in waited - {sequence.request.id for sequence in self.scheduler.waiting}:
                self._add(self.made[name], PROMPT_COST * len(self.made[name].prompt_ids))
            for output in outputs:
                self._add(self.made[output.request_id], OUTPUT_COST * len(output.token_ids))
            self.service.append(dict(self._sum))

    def _ask(self, tenant: str) -> None:
        prompt, tokens = self.sizes[tenant]
        name = f"{tenant}{len(self.made)}"
        prompt, tokens = self.dice.randint(1, prompt), self.dice.randint(1, tokens)
        self.made[name] = asked(name, tenant, prompt, tokens, self.weights[tenant])
        self.scheduler.add(self.made[name])

    def _add(self, one: Request, cost: float) -> None:
        self._sum[one.scheduling.tenant] += cost / one.scheduling.weight


def jain(shares: list[float]) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has everything (Jain, Chiu and Hawe, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def widest(differences: list[float]) -> float:
    """The most that a sequence of numbers changes between any two of its places."""
    return max(differences) - min(differences)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 2.0, "b": 1.0, "c": 0.5}])
def test_service_of_tenants_that_wait_differs_by_no_more_than_the_proven_bound(
    depth: int, weights: dict[str, float]
) -> None:
    served = Served({"a": (LONGEST_PROMPT, 3), "b": (2, LONGEST_REPLY), "c": (6, 6)}, weights, depth)
    served.run(STEPS)
    assert served.scheduler.preemptions == 0
    together = SEQUENCES * (LONGEST_PROMPT + LONGEST_REPLY)  # tokens that can be in the cache at once
    bound = 2 * max(PROMPT_COST * LONGEST_PROMPT, OUTPUT_COST * together) / min(weights.values())
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        difference = [step.get(one, 0.0) - step.get(other, 0.0) for step in served.service]
        assert widest(difference) <= bound
    shares = [served.service[-1][tenant] for tenant in "abc"]
    index = jain(shares)
    print(f"service by weight {shares}, bound {bound:g}, Jain's index {index:.5f}")
    # All shares lie within the bound of one another, so the index of the two furthest apart bounds it from below.
    low = max(shares) - bound
    assert low > 0 and index >= jain([low, max(shares)])


def test_order_of_arrival_alone_would_break_the_bound() -> None:
    """The same load as one tenant: who sends longer requests gets more, so the test above can fail."""
    served = Served(
        {"a": (LONGEST_PROMPT, 3), "b": (1, 1), "c": (LONGEST_PROMPT, LONGEST_REPLY)}, {"a": 1.0, "b": 1.0, "c": 1.0}, 1
    )
    served.scheduler.waiting.shares.charge = lambda *_: None  # type: ignore[method-assign]
    served.run(STEPS)
    assert jain([served.service[-1][tenant] for tenant in "abc"]) < 0.75


def test_one_request_beside_500_of_another_begins_next_and_every_text_is_the_same() -> None:
    scheduler = Scheduler(limits(num_pages=PAGES, max_num_seqs=SEQUENCES, enable_prefix_caching=False))
    ring = FakeRing(scheduler)
    many = [asked(f"many{number}", "many", 1 + number % LONGEST_PROMPT, 1 + number % 5) for number in range(500)]
    for one in many:
        scheduler.add(one)
    outputs = [output for _ in range(20) for output in ring.step()]
    single = asked("single", "single", 8, 4)
    scheduler.add(single)
    ahead, begun = {sequence.request.id for sequence in scheduler.running}, list[str]()
    while "single" not in begun:
        outputs += ring.step()
        begun += [one.request.id for one in scheduler.running if one.request.id not in {*ahead, *begun}]
    # It was lifted to the other's counter, which grows with what runs: at most one of the others begins before it.
    assert len(begun) <= 2, begun
    outputs += ring.run()
    for one in (*many, single):
        ids = [token for output in outputs if output.request_id == one.id for token in output.token_ids]
        assert ids == expected(one)[0]
