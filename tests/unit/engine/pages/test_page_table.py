"""The page pool: every page free or held once, whatever is asked in whatever order; runs stay long where they can."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.properties import examples
from tllm.core.errors import CapacityError
from tllm.engine.pages.page_table import PagePool


class KnownPages(set[int]):
    """An index that knows any pages it is told of."""

    forget = set.remove


class PoolMachine(RuleBasedStateMachine):
    """Against the plainest model: the pages of each owner, and which pages are known."""

    def __init__(self) -> None:
        super().__init__()
        self.known = KnownPages()
        self.pool = PagePool(23, page_size=4, index=self.known)
        self.tables: dict[int, list[int]] = {}

    @property
    def held(self) -> set[int]:
        return {page for pages in self.tables.values() for page in pages}

    @rule(owner=st.integers(0, 5), more=st.integers(1, 40), max_tokens=st.integers(0, 120))
    def cover(self, owner: int, more: int, max_tokens: int) -> None:
        before = self.tables.get(owner, [])
        wanted = 4 * len(before) + more
        missing, free, known = -(-more // 4), self.pool.num_free, set(self.known)
        assert self.pool.cover(owner, wanted, max_tokens) == (missing <= free)
        if missing <= free:
            self._took(owner, before, missing, free, known)
        else:
            assert self.pool.num_free == free and self.known == known

    @rule(data=st.data(), owner=st.integers(6, 9), more=st.integers(0, 20))
    def begin(self, data: st.DataObject, owner: int, more: int) -> None:
        """After any known pages: which ones make a prefix is not the pool's business."""
        if owner in self.tables or not self.known:
            return
        shared = data.draw(st.lists(st.sampled_from(sorted(self.known)), unique=True, max_size=6))
        free, missing, known = self.pool.num_free, -(-more // 4), set(self.known)
        revived = len(set(shared) - self.held)
        begins = missing <= free - revived
        assert self.pool.begin(owner, shared, 4 * len(shared) + more) == begins
        if begins:
            self._took(owner, shared, missing, free - revived, known)
        else:
            assert self.pool.num_free == free and self.known == known

    def _took(self, owner: int, before: list[int], missing: int, free: int, known: set[int]) -> None:
        others = set(range(23)) - self.held - set(before)
        pages = [first + i for first, count in self.pool.page_table(owner) for i in range(count)]
        assert pages[: len(before)] == before, "what was written must stay where it is"
        new = set(pages[len(before) :])
        assert len(pages) == len(before) + missing and len(new) == missing
        assert new <= others, "a page that is held goes to nobody else"
        assert not self.known & new, "a page that is to hold something else is forgotten"
        assert self.known <= known and not (known - self.known) & (self.held | set(before)), "none that is held is"
        assert self.pool.num_free == free - missing
        self.tables[owner] = pages

    @rule(data=st.data())
    def know(self, data: st.DataObject) -> None:
        if self.held:
            self.known.add(data.draw(st.sampled_from(sorted(self.held))))

    @rule(owner=st.integers(0, 9))
    def release(self, owner: int) -> None:
        left = set(self.tables.pop(owner, [])) - self.held
        free = self.pool.num_free
        self.pool.release(owner)
        assert self.pool.num_free == free + len(left)

    @invariant()
    def sound(self) -> None:
        self.pool.check()
        assert self.pool.num_free == 23 - len(self.held)


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
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


def test_check_sees_an_owner_that_is_not_counted() -> None:
    pool = PagePool(4)
    pool.cover(1, 16)
    pool._held[2] = [list(pool.page_table(1)[0])]
    with pytest.raises(AssertionError, match="counted wrongly"):
        pool.check()


def pool_with(pages: int, *left: int) -> tuple[PagePool, KnownPages]:
    """A pool in which owners of so many pages each followed one another and left them all, the first one first."""
    known = KnownPages()
    pool, used = PagePool(pages, page_size=1, index=known), 0
    for owner, count in enumerate(left):
        pool._gaps = [[used, pages]]  # no room is left between them
        pool._num_in_gaps = pages - used
        pool._take(used, count)
        pool._held[owner] = [[used, count]]
        used += count
    known.update(range(used))
    for owner in range(len(left)):
        pool.release(owner)
    pool.check()
    return pool, known


def test_a_cached_page_is_room_for_whoever_needs_it() -> None:
    pool, known = pool_with(10, 4, 6)
    assert pool.num_free == 10
    assert pool.cover(7, 10) and not known
    assert not pool.cover(8, 1)


def test_what_was_let_go_longest_ago_is_taken_first_and_the_last_of_its_owner() -> None:
    pool, known = pool_with(9, 3, 3, 3)
    assert pool.begin(7, [0, 1, 2], 3)
    pool.release(7)  # these are the newest now
    assert pool.cover(8, 2, max_tokens=2)
    assert known == {0, 1, 2, 3, 6, 7, 8}, "two pages, next to each other, and of the oldest owner the last ones"
    pool, known = pool_with(3, 3)
    assert pool.cover(8, 1, max_tokens=1)
    assert known == {0, 1}


def test_what_follows_a_lost_page_is_lost() -> None:
    pool, known = pool_with(24, 4, 20)
    assert pool.begin(6, [0, 1, 2, 3], 4)
    assert pool.begin(7, [*range(4, 20)], 18, max_tokens=18)
    assert pool.page_table(7) == ((4, 18),)
    assert known == set(range(20)), "the two pages, and two that nobody could find any more"


def test_a_sequence_goes_on_in_place_where_little_is_lost() -> None:
    pool, known = pool_with(93, 10, 3, 80)
    assert pool.begin(9, [*range(10)], 12, max_tokens=12) and pool.page_table(9) == ((0, 12),)
    assert known == set(range(93)) - {10, 11, 12}
    pool, known = pool_with(100, 10, 30, 60)
    assert pool.begin(9, [*range(10)], 12, max_tokens=12)
    assert pool.page_table(9) == ((0, 10), (38, 2)), "beginning at page 10 it would make 30 pages worthless"
    assert known == set(range(100)) - {38, 39}


def test_a_full_pool_gives_long_runs() -> None:
    """Chats of many turns take turns in a pool that has room for half of them: no more than a few runs each."""
    known = KnownPages()
    pool, pages, runs = PagePool(300, page_size=1, index=known), dict[int, list[int]](), list[int]()
    for turn in range(160):
        chat = (turn * 7) % 12
        shared = []
        for page in pages.get(chat, []):
            if page not in known:
                break
            shared.append(page)
        length = 8 + 4 * (turn // 12)
        assert pool.begin(turn, shared if len(shared) < length else [], length - 3, max_tokens=400)
        for tokens in range(length - 2, length + 1):
            assert pool.cover(turn, tokens, max_tokens=400)
        table = pool.page_table(turn)
        runs.append(len(table))
        pages[chat] = [first + i for first, count in table for i in range(count)]
        for other in set(pages) - {chat}:
            if (set(pages[chat]) - set(shared)) & set(pages[other]):
                del pages[other]
        known.update(pages[chat])
        pool.release(turn)
        pool.check()
    assert sum(runs) / len(runs) < 2.5 and max(runs) <= 6


def test_shared_pages_go_back_when_the_last_owner_lets_go() -> None:
    pool, known = pool_with(8, 3)
    assert pool.begin(5, [0, 1], 4) and pool.begin(6, [0, 1, 2], 5)
    assert pool.num_free == 8 - 3 - 2 - 2
    pool.release(5)
    assert pool.num_free == 8 - 3 - 2 and not pool.cover(7, 4)
    pool.release(6)
    assert pool.num_free == 8 and known == {0, 1, 2}


def test_a_chat_that_comes_back_is_one_run() -> None:
    """Several chats in turn, each longer every time, in a pool where there is room for all: all stay whole."""
    known = KnownPages()
    pool = PagePool(400, page_size=16, index=known)
    pages: dict[int, list[int]] = {}
    for turn in range(1, 4):
        for chat in range(4):
            assert pool.begin(chat, pages.get(chat, []), 190 * turn, max_tokens=2000)
            table = pool.page_table(chat)
            pages[chat] = [first + i for first, count in table for i in range(count)]
            known.update(pages[chat])
            pool.release(chat)
            pool.check()
            assert len(table) == 1, f"chat {chat}, turn {turn}: {table}"
