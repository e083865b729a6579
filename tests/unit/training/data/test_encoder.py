"""Rows as ids and targets: each form, what is learned of it, and what is wrong with a row that is no row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.training.data.choose_encoder import choose_encoder
from tllm.training.data.encoder import IGNORED, Document, Encoder, fit

TOKENIZER = kits.both()["byte-level"]
EOS = TOKENIZER.eos_id
TEMPLATE = ChatTemplate("{% for m in messages %}<|user|>{{ m.content }}</s>{% endfor %}")


def lists(document: Document) -> tuple[list[int], list[int]]:
    return document.ids.tolist(), document.targets.tolist()


def test_ids_as_given_with_the_next_one_to_predict() -> None:
    assert lists(Encoder(None).encode({"input_ids": [5, 6, 7]})) == ([5, 6, 7], [6, 7, IGNORED])


def test_labels_stand_on_their_own_ids() -> None:
    row = {"input_ids": [5, 6, 7, 8], "labels": [5, IGNORED, IGNORED, 8], "attention_mask": [1, 1, 1, 1]}
    assert lists(Encoder(None).encode(row)) == ([5, 6, 7, 8], [IGNORED, IGNORED, 8, IGNORED])


@pytest.mark.parametrize("end", [True, False])
def test_text_begins_and_ends(end: bool) -> None:
    encoder = Encoder(TOKENIZER, end=end)
    ids, targets = lists(encoder.encode({"text": "hello world"}))
    assert ids == TOKENIZER.encode("hello world") + [EOS] * end
    assert targets == [*ids[1:], IGNORED]
    assert ids[0] == TOKENIZER.bos_id


def test_an_end_that_is_there_is_not_doubled() -> None:
    for row in ({"text": "hello</s>"}, {"prompt": "say", "completion": " hello</s>"}):
        ids, _ = lists(Encoder(TOKENIZER).encode(row))
        assert ids.count(EOS or -1) == 1


def test_a_part_of_a_stream_neither_begins_nor_ends() -> None:
    ids, _ = lists(Encoder(TOKENIZER).encode({"text": "hello"}, whole=False))
    assert ids == TOKENIZER.encode("hello", add_special_tokens=False)


def test_only_the_completion_is_learned() -> None:
    ids, targets = lists(Encoder(TOKENIZER).encode({"prompt": "hello", "completion": " world"}))
    prompt = TOKENIZER.encode("hello")
    completion = [*TOKENIZER.encode(" world", add_special_tokens=False), EOS]
    assert ids == prompt + completion
    assert targets == [IGNORED] * (len(prompt) - 1) + completion + [IGNORED]


def test_a_completion_of_messages_is_learned_and_what_was_said_in_its_prompt_is_not() -> None:
    roles = ("user", "assistant", "user", "assistant")
    words = ("hello", "you", "wide", "world")
    said = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    encoder = Encoder(TOKENIZER, TEMPLATE)
    whole = lists(encoder.encode({"messages": said}))
    ids, targets = lists(encoder.encode({"prompt": said[:3], "completion": said[3:]}))
    assert ids == whole[0]
    last = TOKENIZER.encode("<|user|>world</s>", add_special_tokens=False)
    assert targets == [IGNORED] * (len(ids) - len(last) - 1) + last + [IGNORED]
    assert sum(target != IGNORED for target in whole[1]) > len(last)


def test_an_empty_text_has_nothing() -> None:
    assert len(Encoder(TOKENIZER, end=False).encode({"text": ""}, whole=False).ids) == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no known form"),
        ({"prompt": "a"}, "no known form"),
        ({"content": "a"}, "content"),
        ({"text": 3}, "text is a number, not a text"),
        ({"text": None}, "text is null, not a text"),
        ({"prompt": "a", "completion": ["b"]}, "completion is a list"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": "abc"}, "whole numbers"),
        ({"input_ids": [1.0]}, "whole numbers"),
        ({"input_ids": [True]}, "whole numbers"),
        ({"input_ids": [2**31]}, "whole numbers"),
        ({"input_ids": [1, 500]}, r"holds 500 and the vocabulary is \[0, 500\)"),
        ({"input_ids": [1, -1]}, "holds -1"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 label"),
        ({"input_ids": [1, 2], "labels": [IGNORED, 500]}, r"holds 500 and the vocabulary is \[0, 500\)"),
        ({"input_ids": [1, 2], "labels": [IGNORED, -1]}, "holds -1"),
        ({"messages": "hello"}, "lists of objects"),
        ({"messages": [1]}, "lists of objects"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no turn of the assistant"),
        ({"messages": [], "tools": {}}, "lists of objects"),
    ],
)
def test_what_is_no_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_encoder("texts", TOKENIZER, TEMPLATE, True, 500).encode(row)


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        ("texts", {"text": "hello"}),
        ("texts", {"prompt": "hello", "completion": ""}),
        ("pairs", {"prompt": "hello", "chosen": "a", "rejected": "b"}),
        ("scored_pairs", {"chosen": "hello", "rejected": "b"}),
        ("unpaired", {"prompt": "hello", "completion": "a", "label": True}),
    ],
)
def test_a_tokenizer_with_more_tokens_than_the_model_is_noticed(rows: str, row: dict[str, Any]) -> None:
    """Also where the token stands in a prompt, of which nothing is learned."""
    most = max(TOKENIZER.encode("hello", add_special_tokens=False))
    assert choose_encoder(rows, TOKENIZER, None, True, most + 300).encode(row).ids.max() >= most
    with pytest.raises(ConfigError, match=rf"the row holds {most} and the vocabulary is \[0, {most}\)"):
        choose_encoder(rows, TOKENIZER, None, True, most).encode(row)


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a", "completion": "b"}, {"messages": []}])
def test_text_without_a_tokenizer(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Encoder(None).encode(row)


def test_messages_without_a_template() -> None:
    with pytest.raises(ConfigError, match="no"):
        Encoder(TOKENIZER).encode({"messages": [{"role": "user", "content": "a"}]})


def test_a_long_document_as_the_job_says() -> None:
    document = Document(np.arange(5, dtype=np.int32), np.array([1, 2, 3, 4, IGNORED], dtype=np.int32))
    assert fit(document, 3, "split") is document
    assert fit(document, 5, "refuse") is document
    assert lists(fit(document, 3, "truncate")) == ([0, 1, 2], [1, 2, IGNORED])
    with pytest.raises(ConfigError, match="5 tokens and seq_len is 3"):
        fit(document, 3, "refuse")


def test_the_key_changes_with_what_changes_ids() -> None:
    other = kits.both()["sentencepiece-like"]
    encoders = [Encoder(None), Encoder(TOKENIZER), Encoder(other), Encoder(TOKENIZER, end=False)]
    encoders += [Encoder(TOKENIZER, TEMPLATE), Encoder(TOKENIZER, ChatTemplate("other"))]
    assert len({encoder.key for encoder in encoders}) == len(encoders)
    assert Encoder(TOKENIZER, TEMPLATE).key == encoders[4].key
