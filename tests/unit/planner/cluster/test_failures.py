"""The useful share of a run that fails: the formula against runs drawn one by one, its best interval, its limits."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import ConfigError
from tllm.planner.cluster.failures import Failures

HOUR = 3600.0


def drawn(failures: Failures, nodes: int, interval: float, segments: int, seed: int) -> float:
    """The useful share of a run of so many saves, with failures drawn one after another."""
    chance, mean = random.Random(seed), failures.mean(nodes)
    clock, left = 0.0, chance.expovariate(1 / mean)
    for _ in range(segments):
        phases = [interval + failures.save]
        while phases:
            if left >= phases[-1]:
                left -= phases[-1]
                clock += phases.pop()
            else:  # all of this phase is lost, and a restart comes before it
                clock += left
                left = chance.expovariate(1 / mean)
                phases = [interval + failures.save, failures.restart]
    return segments * interval / clock


@pytest.mark.parametrize(
    ("failures", "nodes", "interval"),
    [
        (Failures(1000 * HOUR, 60, 600), 100, 2 * HOUR),
        (Failures(1000 * HOUR, 600, 1800), 1000, 0.5 * HOUR),
        (Failures(30 * HOUR, 30, 0), 10, 3 * HOUR),
    ],
)
def test_the_formula_is_what_draws_come_to(failures: Failures, nodes: int, interval: float) -> None:
    """The mean of 40 runs of 1,000 saves lies within four of its standard deviations."""
    shares = [drawn(failures, nodes, interval, 1000, seed) for seed in range(40)]
    mean = math.fsum(shares) / len(shares)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in shares) / (len(shares) - 1) / len(shares))
    assert abs(mean - failures.useful(nodes, interval)) < 4 * deviation
    assert deviation < 0.01


@given(st.floats(1, 1e4), st.floats(1, 1e5), st.integers(1, 10_000), st.floats(0.2, 5))
def test_no_other_interval_is_better(save: float, restart: float, nodes: int, other: float) -> None:
    failures = Failures(1e7, save, restart)
    best = failures.best(nodes)
    assert failures.useful(nodes, best) >= failures.useful(nodes, other * best) * (1 - 1e-12)


@given(st.floats(1, 100), st.integers(1, 100))
def test_short_saves_come_to_young_and_daly(save: float, nodes: int) -> None:
    """With d / M below 1e-4, Young is off by the order of sqrt(d / M), Daly by far less."""
    failures = Failures(1e8, save, 0)
    best, mean = failures.best(nodes), failures.mean(nodes)
    ratio = save / (2 * mean)
    assert daly(save, mean) == pytest.approx(best, rel=10 * ratio)
    assert young(save, mean) == pytest.approx(best, rel=2 * math.sqrt(ratio))


def young(save: float, mean: float) -> float:
    """The best interval while saves are short: sqrt(2 d M) (Young, 1974, A first order approximation)."""
    return math.sqrt(2 * save * mean)


def daly(save: float, mean: float) -> float:
    """The same to a higher order (Daly, 2006, equation 37)."""
    ratio = save / (2 * mean)
    return young(save, mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def test_long_saves_want_an_interval_as_long_as_the_time_between_failures() -> None:
    failures = Failures(100.0, 1000, 0)
    assert failures.best(1) == pytest.approx(100, rel=1e-3)


def test_more_nodes_and_longer_saves_leave_less() -> None:
    some = Failures(1000 * HOUR, 60, 600)
    assert some.useful(100, some.best(100)) > some.useful(1000, some.best(1000)) > 0
    longer = Failures(1000 * HOUR, 120, 600)
    assert some.useful(100, some.best(100)) > longer.useful(100, longer.best(100))
    assert some.useful(10**9, HOUR) == 0.0, "nothing lasts, and no overflow"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((0, 1, 1), "between"), ((1, 0, 1), "save"), ((1, 1, -1), "restart"), ((math.inf, 1, 1), "between")],
)
def test_times_that_cannot_be(numbers: tuple[float, float, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Failures(*numbers)
