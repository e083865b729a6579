"""When nodes that join stop a run, and when it goes on without them."""

from __future__ import annotations

from tllm.node.recovery.growth import Growth


def test_ranks_are_worth_a_pause_once_they_were_missed_as_long_as_it_takes() -> None:
    now = 0.0
    growth = Growth(lambda: now)
    assert growth.is_worth(3, 1), "no pause is known yet"
    growth.opened(pause=4.0)
    for now, more, is_worth in (
        (10.0, 0, False),
        (20.0, 1, False),  # from now on one is missed, of which a pause of all three would take twelve seconds
        (26.0, 2, False),
        (28.5, 2, False),
        (29.0, 2, True),
        (30.0, 0, False),
    ):
        assert growth.is_worth(3, more) == is_worth, now
    growth.opened(pause=4.0)
    assert not growth.is_worth(3, 2), "with each epoch it begins anew"
