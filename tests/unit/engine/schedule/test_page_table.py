"""The page pool: every page free or held once, whatever is asked in whatever order; runs stay long where they can."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tllm.core.errors import CapacityError
from tllm.engine.schedule.page_table import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Against the plainest model: a dict of how many tokens each owner was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(23, page_size=4)
        self.tokens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    @rule(owner=st.integers(0, 5), more=st.integers(1, 40), max_tokens=st.integers(0, 120))
    def cover(self, owner: int, more: int, max_tokens: int) -> None:
        wanted = self.tokens.get(owner, 0) + more
        missing = -(-wanted // 4) - self.pool.num_held(owner)
        free = self.pool.num_free
        assert self.pool.cover(owner, wanted, max_tokens) == (missing <= free)
        if missing <= free:
            self.tokens[owner] = wanted
            assert self.pool.num_free == free - missing
            pages = [first + i for first, count in self.pool.page_table(owner) for i in range(count)]
            before = self.tables.get(owner, [])
            assert pages[: len(before)] == before, "what was written must stay where it is"
            assert len(pages) == -(-wanted // 4)
            self.tables[owner] = pages
        else:
            assert self.pool.num_free == free

    @rule(owner=st.integers(0, 5))
    def release(self, owner: int) -> None:
        held, free = self.pool.num_held(owner), self.pool.num_free
        self.pool.release(owner)
        self.tokens.pop(owner, None)
        self.tables.pop(owner, None)
        assert self.pool.num_free == free + held

    @invariant()
    def sound(self) -> None:
        self.pool.check()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_sequences_that_grow_together_each_keep_one_run() -> None:
    pool = PagePool(1000, page_size=16)
    for owner in range(8):
        assert pool.cover(owner, 100, max_tokens=600)
    for tokens in range(101, 601):
        for owner in range(8):
            assert pool.cover(owner, tokens, max_tokens=600)
    assert [len(pool.page_table(owner)) for owner in range(8)] == [1] * 8


def test_a_full_pool_uses_every_page_in_pieces() -> None:
    pool = PagePool(6, page_size=1)
    for owner in range(6):
        assert pool.cover(owner, 1)
    for owner in (0, 2, 4):
        pool.release(owner)
    assert pool.cover(9, 3)
    assert sorted(first + i for first, count in pool.page_table(9) for i in range(count)) in (
        [0, 1, 2],
        [0, 2, 4],
        [3, 4, 5],
    )
    assert not pool.cover(10, 1)
    pool.check()


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(CapacityError, match="0 pages of 16"):
        PagePool(0)


def test_check_sees_a_page_that_is_held_twice() -> None:
    pool = PagePool(4)
    pool.cover(1, 16)
    pool._held[2] = [list(pool.page_table(1)[0])]
    with pytest.raises(AssertionError, match="other than once"):
        pool.check()
