"""Text in pieces: nothing given out changes later, nothing is half a character, all of it is the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.text import kits
from tllm.text.detokenizer import Detokenizer
from tllm.text.token_bytes import ends_inside_character

KITS = kits.both()
NAMES = pytest.mark.parametrize("name", list(KITS))
texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(list(" the▁ \n🙂é日�"))), max_size=40
)


@NAMES
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_pieces_join_to_the_whole_text(name: str, text: str) -> None:
    tokenizer = KITS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert detokenizer.finish() == ""
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@NAMES
@settings(max_examples=100, deadline=None)
@given(text=texts, cut=st.integers(0, 60))
def test_a_text_goes_on_after_its_prompt(name: str, text: str, cut: int) -> None:
    tokenizer = KITS[name]
    ids = tokenizer.encode("the dog " + text + " and", add_special_tokens=False)
    cut = min(cut, len(ids))
    while ends_inside_character(b"".join(map(tokenizer.token_bytes, ids[max(0, cut - 4) : cut]))):
        cut -= 1
    detokenizer = Detokenizer(tokenizer, prompt_ids=ids[:cut])
    reply = detokenizer.push(ids[cut:]) + detokenizer.finish()
    assert tokenizer.decode(ids[:cut]) + reply == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_at_all_give_the_text_of_the_whole(data: st.DataObject) -> None:
    tokenizer = KITS["byte-level"]
    ids = data.draw(st.lists(st.integers(4, tokenizer.size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids)


def test_characters_that_break_each_other_off_do_not_wait_for_ever() -> None:
    """Of three bytes each, and of each two come: they are given out one by one, as broken."""
    tokenizer = KITS["sentencepiece-like"]
    two = tokenizer.encode("\u1000", add_special_tokens=False)[-3:-1]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in 5 * two]
    assert all("\ufffd" in piece for piece in pieces[2::2]) and not any(pieces[1::2])
    assert "\ufffd" in detokenizer.finish()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_broken_byte_tokens_never_fail_and_never_wait_long(data: st.DataObject) -> None:
    tokenizer = KITS["sentencepiece-like"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 5), max_size=60))
    detokenizer = Detokenizer(tokenizer, prompt_ids=ids[:10])
    for token_id in ids[10:]:
        detokenizer.push([token_id])
        assert len(detokenizer._window) - detokenizer._read <= 3
    detokenizer.finish()


@NAMES
def test_a_character_in_four_tokens_comes_out_once_whole(name: str) -> None:
    tokenizer = KITS[name]
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) == "a🙂b"
    assert all("\ufffd" not in piece for piece in pieces)
    cut = Detokenizer(tokenizer)
    text = cut.push(ids[:-2])
    assert text == "a"
    assert "\ufffd" in cut.finish()


@NAMES
def test_a_prompt_that_ends_inside_a_character_is_completed_by_the_reply(name: str) -> None:
    tokenizer = KITS[name]
    ids = tokenizer.encode("the 🙂🙂", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids=ids[:-2])
    assert detokenizer.push(ids[-2:]) == "🙂"


@NAMES
def test_special_tokens_show_only_when_wanted_and_keep_the_spaces(name: str) -> None:
    tokenizer = KITS[name]
    [end] = tokenizer.encode("</s>", add_special_tokens=False)[-1:]
    ids = [*tokenizer.encode("the dog", add_special_tokens=False), end]
    words = tokenizer.encode("a dog", add_special_tokens=False)
    ids += words
    hidden = Detokenizer(tokenizer)
    assert "".join(hidden.push([i]) for i in ids) == tokenizer.decode(ids, skip_special_tokens=True)
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(shown.push([i]) for i in ids) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def begun_characters() -> frozenset[bytes]:
    """The first bytes of every character that has more of them."""
    characters = (chr(code).encode() for code in range(0x80, 0x110000) if not 0xD800 <= code <= 0xDFFF)
    return frozenset(character[:length] for character in characters for length in range(1, len(character)))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=5), tail=st.binary(max_size=4))
@example(text="", tail=b"\xed\xa0")  # no character begins so, though Python's incremental decoder waits for the rest
def test_ends_inside_character_agrees_with_all_characters(
    begun_characters: frozenset[bytes], text: str, tail: bytes
) -> None:
    data = text.encode() + tail
    assert ends_inside_character(data) == any(data[-length:] in begun_characters for length in (1, 2, 3))
