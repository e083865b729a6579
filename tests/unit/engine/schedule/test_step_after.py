"""Steps that are begun before the last tokens are known: the same tokens, and pages that nobody reads too early."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from tests.unit.engine.kits import VOCAB, FakeRing, expected, limits, request
from tllm.engine.overlapped_steps import step_after
from tllm.engine.schedule.scheduler import ScheduledStep, Scheduler
from tllm.spec.request import Output, Request


class OverlappedRing(FakeRing):
    """Before it takes the results of a step, it computes the one after it, with the tokens of these results."""

    followed = 0

    def step(self) -> list[Output]:
        if not self.in_flight:
            self.start()
        if self.in_flight:
            step, results = self.in_flight[0]
            following = step_after(step, self.scheduler)
            if following is not None:
                self._follow(following, results.token_ids)
            return self.finish()
        return []

    def _follow(self, following: ScheduledStep, token_ids: tuple[int, ...]) -> None:
        assert not any(following.batch.token_ids)
        known = tuple(token_ids[place] for place in following.sources)
        batch = msgspec.structs.replace(following.batch, token_ids=known)
        self.in_flight.append((following, self._compute(replace(following, batch=batch))))
        self.followed += 1


def served(
    ring: FakeRing, asked: list[Request], arrivals: list[int], cancelled: dict[int, str]
) -> dict[str, list[int]]:
    """The tokens of each request, where some come at a step and some are cancelled after one."""
    got: dict[str, list[int]] = {one.id: [] for one in asked}
    ended: set[str] = set()
    step = 0
    while step <= max(arrivals) or ring.scheduler.has_work or ring.in_flight:
        for one in (one for one, at in zip(asked, arrivals, strict=True) if at == step):
            ring.scheduler.add(one)
        outputs = ring.step()
        if (output := ring.scheduler.cancel(cancelled.get(step, ""))) is not None:
            outputs.append(output)
        for output in outputs:
            assert output.request_id not in ended, "nothing comes after an end"
            got[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended.add(output.request_id)
        step += 1
        assert step < 2000
    assert ended == set(got)
    return got


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_of_one_step_after_another(seed: int) -> None:
    """With ends that nobody knows in advance, cancellations, late requests, shared prefixes and too few pages."""
    dice = random.Random(seed)
    sizes = limits(num_pages=dice.choice((16, 20, 40)))
    ring = OverlappedRing(Scheduler(sizes))
    asked = [
        request(
            f"{n}",
            [*range(1, dice.randint(2, 12)), *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 9)))],
            max_tokens=dice.randint(1, 30),
            stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice((0, 2, 5)))),
        )
        for n in range(7)
    ]
    arrivals = [dice.choice((0, 0, dice.randint(0, 25))) for _ in asked]
    cancelled = {dice.randint(1, 30): dice.choice(asked).id for _ in range(dice.choice((0, 2)))}
    got = served(ring, asked, arrivals, cancelled)
    for one in asked:
        want = expected(one)[0]
        assert got[one.id] == want if one.id not in cancelled.values() else got[one.id] == want[: len(got[one.id])]
    assert ring.followed > 3
    ring.scheduler.pages.pool.check()
    assert ring.scheduler.pages.pool.num_free == sizes.num_pages and ring.scheduler.in_flight == 0


def test_with_too_few_pages_sequences_are_preempted_as_ever() -> None:
    ring = OverlappedRing(Scheduler(limits(num_pages=12)))
    asked = [request(f"{n}", [n + 1, 2, 3, 4, 5], max_tokens=25) for n in range(4)]
    got = served(ring, asked, [0] * 4, {})
    assert got == {one.id: expected(one)[0] for one in asked}
    assert ring.scheduler.preemptions > 0 and ring.followed > 10


def test_no_step_goes_before_a_request_that_could_begin() -> None:
    scheduler = Scheduler(limits(max_num_seqs=2))
    ring = OverlappedRing(scheduler)
    for name in "ab":
        scheduler.add(request(name, 3, max_tokens=9))
    ring.step()
    assert ring.followed == 1
    scheduler.add(request("c", 3, max_tokens=9))
    ring.step()
    assert ring.followed == 2, "all places are taken"
    scheduler.cancel("a")
    ring.step()
    assert ring.followed == 2 and not ring.in_flight
    ring.step()
    assert ring.sizes[-1] == [1, 3], "c begins with the next batch"


def test_a_request_that_finds_no_pages_holds_no_step_up() -> None:
    """It waits for pages, and there are places: steps go on before their tokens are known until there are enough."""
    scheduler = Scheduler(limits(num_pages=9))
    ring = OverlappedRing(scheduler)
    scheduler.add(request("a", 11, max_tokens=16))
    ring.step()
    scheduler.add(request("large", list(range(20, 44)), max_tokens=3))
    followed, steps = ring.followed, 0
    while "a" in scheduler.by_id:
        assert not scheduler.by_id["large"].token_ids[24:], "it has not begun"
        ring.step()
        steps += 1
    assert ring.followed - followed == steps - 1 == 14, "all steps but the last one"
    tokens = list[int]()
    while scheduler.has_work:
        tokens += [token for output in ring.step() for token in output.token_ids]
    assert tokens == expected(request("large", list(range(20, 44)), max_tokens=3))[0]


def test_pages_that_those_who_run_need_next_are_nobody_elses() -> None:
    """A waiting request fits beside what is computed now, and not beside the next page of those that run."""
    scheduler = Scheduler(limits(num_pages=4))
    ring = OverlappedRing(scheduler)
    scheduler.add(request("a", 11, max_tokens=3))
    ring.step()
    scheduler.add(request("b", list(range(20, 24)), max_tokens=1))
    assert scheduler.pages.pool.num_free == 1 and ring.followed == 1, "b would have the last page"
    ring.step()
    assert ring.followed == 2


def test_what_ends_by_its_length_has_no_row_and_nothing_follows_the_last() -> None:
    ring = OverlappedRing(Scheduler(limits()))
    ring.scheduler.add(request("a", 3, max_tokens=2))
    ring.scheduler.add(request("b", 3, max_tokens=3))
    followers = []
    while ring.scheduler.has_work:
        ring.step()
        followers += [step.sources for step, _ in ring.in_flight]
    assert followers == [(0, 1), (1,)]
