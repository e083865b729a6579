"""The immutable mapping, against a dict that is copied for each change."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.ordered_trie import LEAF, OrderedTrie

COLLIDING = ("plumless", "buckeroo")
"""Two words with the same CRC-32."""

names = st.one_of(st.integers(0, 60).map(str), st.sampled_from(COLLIDING))


@given(st.lists(st.tuples(names, st.integers(), st.booleans()), max_size=150))
def test_it_is_what_a_dict_is_and_no_change_touches_what_was_there_before(
    changes: list[tuple[str, int, bool]],
) -> None:
    trie, plain = OrderedTrie[int](), dict[str, int]()
    kept: list[tuple[OrderedTrie[int], dict[str, int]]] = []
    for name, value, replaces in changes:
        if replaces and name in plain:
            trie, plain = trie.replaced(name, value), {**plain, name: value}
        else:
            plain = {other: known for other, known in plain.items() if other != name} | {name: value}
            trie = trie.added(name, value)
        kept.append((trie, plain))
    for before, wanted in kept:
        assert list(before) == list(wanted.values()) and len(before) == len(wanted)
        assert all(before.get(name) == value for name, value in wanted.items())
        assert before == OrderedTrie.of(wanted.items())


def test_names_with_one_hash_share_a_leaf_however_many_there_are() -> None:
    assert len({crc32(word.encode()) for word in COLLIDING}) == 1
    names = [*COLLIDING, *map(str, range(5000))]
    trie = OrderedTrie.of((name, place) for place, name in enumerate(names))
    assert list(trie) == list(range(len(names)))
    assert [trie.get(word) for word in COLLIDING] == [0, 1] and trie.get("nobody") is None


def test_a_change_copies_a_few_parts_only() -> None:
    """Of 4,096 values all but those of one leaf are shared with the trie before."""
    trie = OrderedTrie.of((str(number), number) for number in range(4096))

    def leaves(part: object) -> list[dict[str, object]]:
        return [leaf for one in part for leaf in leaves(one)] if isinstance(part, tuple) else [part]  # type: ignore[list-item]

    before, after = leaves(trie._root), leaves(trie.replaced("77", -1)._root)
    assert len(before) == len(after) >= 4096 / LEAF
    assert sum(one is not other for one, other in zip(before, after, strict=True)) == 1


def test_nobody_is_replaced_who_is_not_there() -> None:
    with pytest.raises(KeyError, match="b"):
        OrderedTrie.of([("a", 1)]).replaced("b", 2)
