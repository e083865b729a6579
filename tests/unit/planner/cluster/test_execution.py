"""Messages beside products: the formula against both played in small steps of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import ConfigError
from tllm.planner.cluster.execution import Execution


def together(messages: int, products: int, slowdown: int) -> float:
    """Seconds of both, begun at once: while messages are under way a product takes `slowdown` times as long."""
    clock, done = 0, 0.0
    while done < products or clock < messages:
        done += 1 / slowdown if clock < messages else 1
        clock += 1
        if done >= products and clock >= messages:
            break
    return clock


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 3))
def test_both_together_as_played(messages: int, products: int, slowdown: int) -> None:
    outlasts = Execution(slowdown=slowdown).overlap_excess(messages, products)
    played = together(messages, products, slowdown) - products
    assert played - 1 < outlasts + 1e-9 and outlasts - 1 < played + 1e-9, "but for the last step of the clock"
    assert outlasts >= max(0, messages - products) - 1e-9


@given(st.floats(0, 1), st.floats(1, 2), st.floats(0, 10), st.floats(0, 10))
def test_a_part_beside_products(share: float, slowdown: float, messages: float, products: float) -> None:
    execution = Execution(overlap=(("tp", share),), slowdown=slowdown)
    assert execution.exposed_seconds("ep", messages, products) == messages, "others are waited for"
    waited = execution.exposed_seconds("tp", messages, products)
    assert (1 - share) * messages - 1e-9 <= waited <= messages + 1e-9
    alone = Execution(overlap=(("tp", share),)).exposed_seconds("tp", messages, products)
    assert alone <= waited + 1e-9, "a slowdown never gains"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"overlap": (("pp", 0.5),)}, "pp = 0.5"),
        ({"overlap": (("tp", 1.5),)}, "tp = 1.5"),
        ({"slowdown": 0.9}, "slowdown"),
        ({"touches": -1.0}, "touches"),
        ({"attention": 0.0}, "attention"),
        ({"recompute_share": 1.5}, "again"),
    ],
)
def test_what_cannot_be(made: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Execution(**made)  # type: ignore[arg-type]
