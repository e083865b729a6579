"""Conversations: the ids of the whole text, as `transformers` has them, and exactly the assistant's turns marked."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.text import kits
from tllm.core.errors import RequestError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.chat_labels import ChatEncoder

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As reasoning models have it: the last turn shows its thoughts, earlier ones lose them; the prompt opens a thought.
THINKS = (
    "{% for m in messages %}<|user|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n<think>{% endif %}"
)
MARKED = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|user|>assistant\n' }}
        {%- generation %}
            {{- m.content }}</s>
        {%- endgeneration %}
    {% else %}
<|user|>{{ m.role }}
{{ m.content }}</s>
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|user|>assistant
{% endif %}"""
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello there "},
    {"role": "assistant", "content": " I am fine. "},
    {"role": "user", "content": "how are you?\n\n"},
    {"role": "assistant", "content": "Größe und Maß", "reasoning_content": "hello world"},
]


def said(source: str, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """The ids, and the text of each run of tokens that the model says."""
    template = ChatTemplate(source, tokenizer.special_tokens)
    ids, marks = ChatEncoder(template, tokenizer).encode(messages)
    runs: list[list[int]] = []
    for i, (token, mark) in enumerate(zip(ids, marks, strict=True)):
        if mark and (i == 0 or not marks[i - 1]):
            runs.append([])
        if mark:
            runs[-1].append(token)
    assert ids == tokenizer.encode(template.render(messages, add_generation_prompt=False), add_special_tokens=False)
    return ids, [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (PLAIN, ["I am fine.</s>", "Größe und Maß</s>"]),
        (NO_END, [" I am fine. \n", "Größe und Maß\n"]),
        (THINKS, [" I am fine. </s>", "hello world</think>Größe und Maß</s>"]),
        (MARKED, [" I am fine. </s>", "Größe und Maß</s>"]),
    ],
)
def test_exactly_the_turns_of_the_assistant(source: str, wanted: list[str]) -> None:
    _, runs = said(source, CHAT, kits.both()["byte-level"])
    for key, no, yes in (("train", False, True), ("training", False, True), ("weight", 0, 1)):
        for place in range(2):
            chat = [dict(message) for message in CHAT]
            chat[(2, 4)[place]][key], chat[(4, 2)[place]][key] = no, yes
            assert said(source, chat, kits.both()["byte-level"])[1] == [wanted[1 - place]]
    assert runs == wanted


def test_a_conversation_that_ends_with_the_user() -> None:
    _, runs = said(PLAIN, CHAT[:4], kits.both()["byte-level"])
    assert runs == ["I am fine.</s>"]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-like"])
@settings(max_examples=examples(40))
@given(contents=st.lists(st.text("abc .\né<>/s|", min_size=1, max_size=12), min_size=1, max_size=6))
def test_marks_as_transformers_sets_them(
    kind: str, contents: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same template with `{% generation %}`, by `transformers` and here; and here without its marks too."""
    tokenizer = kits.both()[kind]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["q", *contents])]
    folder = kits.save(tmp_path_factory.mktemp("t"), tokenizer.inner, {"bos_token": "<s>", "eos_token": "</s>"})
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, marks = ChatEncoder(ChatTemplate(MARKED, tokenizer.special_tokens), tokenizer).encode(messages)
    assert ids == theirs["input_ids"]
    if kind == "byte-level":  # the other merges across a turn's beginning; they learn such a token, here it is told
        assert [int(mark) for mark in marks] == theirs["assistant_masks"]
    if not any("</s>" in text for text in contents):
        plain = MARKED.replace("{%- generation", "{%- if true").replace("{%- endgeneration", "{%- endif")
        assert ChatEncoder(ChatTemplate(plain, tokenizer.special_tokens), tokenizer).encode(messages) == (ids, marks)


def test_a_template_that_changes_what_came_before_is_refused() -> None:
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="another way") as raised:
        said(source, CHAT, kits.both()["byte-level"])
    assert "generation" in raised.value.hint


def test_a_turn_without_an_end_is_refused() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    with pytest.raises(RequestError):
        said(source, CHAT, kits.both()["byte-level"])


def test_tools_reach_the_template() -> None:
    tokenizer = kits.both()["byte-level"]
    source = "{{ tools[0].name if tools }}" + PLAIN
    template = ChatTemplate(source, tokenizer.special_tokens)
    with_tools, marks = ChatEncoder(template, tokenizer).encode(CHAT, [{"name": "read"}])
    without, plain = ChatEncoder(template, tokenizer).encode(CHAT)
    assert tokenizer.decode(with_tools).startswith("read")
    assert sum(marks) == sum(plain)
    assert len(with_tools) > len(without)


@pytest.mark.parametrize(
    ("number", "more", "says"),
    [
        (2, {"train": "no"}, "train of message 2 is 'no'"),
        (2, {"weight": 0.5}, "weight of message 2 is 0.5"),
        (1, {"train": True}, "message 1 of the role 'user' is to be learned"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(number: int, more: dict[str, Any], says: str) -> None:
    chat = [message | (more if place == number else {}) for place, message in enumerate(CHAT)]
    with pytest.raises(RequestError, match=says):
        said(PLAIN, chat, kits.both()["byte-level"])


def test_turns_that_the_template_marks_in_part_cannot_be_chosen_from() -> None:
    of_last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    chat = [message | ({"train": False} if place == 2 else {}) for place, message in enumerate(CHAT)]
    with pytest.raises(RequestError, match="marks 1 turn, the conversation has 2 of the assistant"):
        said(of_last, chat, kits.both()["byte-level"])
