"""Rows of preferences as documents: each form that TRL has, what is learned of it, and rows that are none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.training.data.choose_encoder import RowEncoder, choose_encoder, open_rows
from tllm.training.data.encoder import IGNORED, Document, fit
from tllm.training.data.packing import RowLengths
from tllm.training.data.preference_rows import CHOSEN, MISMATCHED, REJECTED

TOKENIZER = kits.both()["byte-level"]
EOS = TOKENIZER.eos_id
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    TOKENIZER.special_tokens,
)
ASK = {"role": "user", "content": "hello"}


def encoder(rows: str, end: bool = True) -> RowEncoder:
    return choose_encoder(rows, TOKENIZER, TEMPLATE, end, None)


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def parts(document: Document) -> list[tuple[list[int], list[int]]]:
    """(ids, those that are learned) of each part."""
    bounds = np.cumsum([0, *document.parts])
    found = []
    for start, stop in itertools.pairwise(bounds):
        targets = document.targets[start:stop]
        found.append((document.ids[start:stop].tolist(), targets[targets != IGNORED].tolist()))
    return found


def ids(text: str, special: bool = False) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=special)


def test_texts_are_encoded_as_a_prompt_and_two_ends() -> None:
    document = encoder("pairs").encode({"prompt": "hello", "chosen": " world wide", "rejected": " you"})
    (won, chosen), (lost, rejected) = parts(document)
    assert won == ids("hello", True) + chosen and lost == ids("hello", True) + rejected
    assert chosen == [*ids(" world wide"), EOS] and rejected == [*ids(" you"), EOS]
    assert document.weight == 1.0 and document.values["role"].tolist() == [CHOSEN, REJECTED]
    assert document.values["reply_tokens"].tolist() == [len(chosen), len(rejected)]


def test_the_tail_begins_after_as_many_tokens_as_the_shorter_reply_has() -> None:
    document = encoder("pairs").encode({"prompt": "hello", "chosen": " world wide web", "rejected": " you"})
    (won, chosen), (lost, rejected) = parts(document)
    shared = len(rejected)
    assert len(chosen) > shared
    tail, end = document.values["tail"].tolist()
    assert end == len(lost) and won[tail + 1 :] == chosen[shared:]


def test_a_prompt_that_is_not_given_is_what_both_begin_with() -> None:
    given = encoder("pairs").encode({"prompt": "hello", "chosen": " world", "rejected": " you"})
    found = encoder("pairs").encode({"chosen": "hello world", "rejected": "hello you"})
    assert given.ids.tolist() == found.ids.tolist() and given.targets.tolist() == found.targets.tolist()


def test_conversations_learn_what_the_model_says_after_the_prompt() -> None:
    before = [ASK, say("yes"), ASK]
    row = {"prompt": before, "chosen": [say("world")], "rejected": [say("you")]}
    document = encoder("pairs").encode(row)
    (won, chosen), (_, rejected) = parts(document)
    assert won == ids("<|user|>hello</s><|assistant|>yes</s><|user|>hello</s><|assistant|>world</s>")
    assert chosen == ids("world</s>") and rejected == ids("you</s>")
    implicit = {"chosen": [*before, say("world")], "rejected": [*before, say("you")]}
    assert encoder("pairs").encode(implicit).targets.tolist() == document.targets.tolist()
    named = encoder("pairs").encode({**implicit, "prompt": "hello"})
    assert named.targets.tolist() == document.targets.tolist()


def test_a_reply_of_several_turns_does_not_learn_what_the_user_says_in_it() -> None:
    row = {"prompt": [ASK], "chosen": [say("world"), ASK, say("yes")], "rejected": [say("you")]}
    (_, chosen), _ = parts(encoder("pairs").encode(row))
    assert chosen == ids("world</s>") + ids("yes</s>")


def test_a_reward_model_reads_whole_texts_and_predicts_none() -> None:
    row = {"prompt": "hello", "chosen": " world", "rejected": " you", "margin": 0.5}
    document = encoder("scored_pairs").encode(row)
    assert [part for part, _ in parts(document)] == [
        [*ids("hello world", True), EOS],
        [*ids("hello you", True), EOS],
    ]
    assert set(document.targets.tolist()) == {IGNORED} and document.values["margin"].tolist() == [0.5, 0.5]
    talks = encoder("scored_pairs").encode({"chosen": [ASK, say("world")], "rejected": [say("you")]})
    assert parts(talks)[1][0] == ids("<|assistant|>you</s>") and talks.values["margin"].tolist() == [0, 0]


def test_a_side_without_a_token_has_no_score() -> None:
    bare = choose_encoder("scored_pairs", kits.both()["sentencepiece-like"], None, False, None)
    with pytest.raises(ConfigError, match="rejected has no token"):
        bare.encode({"chosen": "hello", "rejected": ""})


def test_an_unpaired_row_stands_with_the_reply_to_another_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "hello", "completion": " world", "label": true}\n'
        '{"prompt": "you", "completion": " hello", "label": false}\n'
    )
    rows = open_rows("mismatched", [str(path)], "blank_lines")
    first, second = (encoder("mismatched").encode(rows.read(i)) for i in (0, 1))
    assert first.values["role"].tolist() == [CHOSEN, MISMATCHED]
    assert second.values["role"].tolist() == [REJECTED, MISMATCHED]
    assert [learned for _, learned in parts(first)] == [[*ids(" world"), EOS], [*ids(" hello"), EOS]]
    assert parts(first)[1][0] == [*ids("hello", True), *ids(" hello"), EOS]
    alone = encoder("unpaired").encode(rows.read(0))
    assert alone.values["role"].tolist() == [CHOSEN]
    rows.close()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no rejected"),
        ({"prompt": "a", "rejected": "b"}, "has no chosen"),
        ({"text": "a"}, "has no chosen"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "chosen is null"),
        ({"prompt": "hello", "chosen": " you", "rejected": " you"}, "the same"),
        ({"chosen": "you", "rejected": "hello"}, "begin differently"),
        ({"prompt": "a", "chosen": [say("b")], "rejected": "c"}, "chosen is messages and rejected is a text"),
        ({"prompt": [ASK], "chosen": "b", "rejected": "c"}, "prompt is messages and chosen is a text"),
        ({"prompt": [ASK], "chosen": [], "rejected": [say("c")]}, "chosen is neither"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is neither"),
        ({"prompt": "other", "chosen": [ASK, say("b")], "rejected": [ASK, say("c")]}, "in none of the 1 messages"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [say("c")]}, "chosen has no token"),
        ({"prompt": [ASK], "chosen": [say("b")], "rejected": [say("c")], "tools": "x"}, "tools must be"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        encoder("pairs").encode(row)


def test_a_template_that_shows_the_prompt_in_another_way_is_refused() -> None:
    odd = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    with pytest.raises(ConfigError, match="another way"):
        choose_encoder("pairs", TOKENIZER, odd, True, None).encode(
            {"prompt": [ASK], "chosen": [say("b")], "rejected": [say("c")]}
        )


@pytest.mark.parametrize("label", [None, 1, "yes"])
def test_a_label_is_true_or_false(label: object) -> None:
    with pytest.raises(ConfigError, match="label is"):
        encoder("unpaired").encode({"prompt": "a", "completion": "b", "label": label})


@pytest.mark.parametrize("margin", ["big", True, float("nan"), float("-inf"), pytest.param(10**400, id="huge")])
def test_a_margin_is_a_number(margin: object) -> None:
    with pytest.raises(ConfigError, match="margin is"):
        encoder("scored_pairs").encode({"chosen": "a", "rejected": "b", "margin": margin})


def test_a_pair_that_is_longer_than_a_row_is_refused_and_not_cut() -> None:
    document = encoder("pairs").encode({"prompt": "hello", "chosen": " world", "rejected": " you"})
    with pytest.raises(ConfigError, match="stay together"):
        fit(document, len(document.ids) - 1, "truncate")


@pytest.mark.parametrize(
    ("tokens", "packed", "filled"),
    [
        (64, False, (1, 6, 2)),
        (64, True, (4, 6, 2)),
        (70, True, (4, 6, 2)),
        (10, True, (1, 4, 1)),
        (10, False, (1, 4, 1)),
        (2, False, (1, 1, 1)),
    ],
)
def test_packed_pairs_fill_a_row_in_their_own_proportion_and_others_are_as_they_are(
    tokens: int, packed: bool, filled: tuple[int, int, int]
) -> None:
    assert RowLengths(6, 2, 2).filling(tokens, packed) == filled
