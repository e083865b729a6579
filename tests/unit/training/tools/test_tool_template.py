"""Results of tools as ids that are appended: those that the whole conversation has there, for each kind of template."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from tests.support.training.post_training.tool_task import TEMPLATE
from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.tools.tool_functions import FunctionCall, ToolResult
from tllm.training.tools.tool_template import ToolTemplate

SCHEMAS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": {"type": "object"}}}
    for name in ("look", "add")
]
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
)
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
KEEPS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
DROPS = "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
EMPTY = (
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}<think>{{ m.reasoning_content or '' }}"
    "</think>{% endif %}"
)
LAST = "{% if loop.last and m.role == 'assistant' %}(the last){% endif %}"


def chat(turn: str, end: str = "<end>\n", opened: str = OPEN) -> str:
    return (
        TOOLS
        + "{% for m in messages %}<{{ m.role }}>"
        + turn
        + "{{ m.content }}"
        + CALLS
        + end
        + "{% endfor %}"
        + (opened)
    )


OBSERVED = (
    TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<tool>{% endif %}"
    "[{{ m.content }}]{% else %}<{{ m.role }}>{{ m.content }}" + CALLS + "{% endif %}{% endfor %}" + OPEN
)
"""Turns have no end: a call is ended by the sign that begins results."""


def tokenizer_of(*ends: str) -> Tokenizer:
    """Of parts of words, with the signs of these templates as special tokens."""
    inner = tokenizers.Tokenizer.from_str(kits.byte_level().to_str())
    inner.add_special_tokens(["<user>", "<assistant>", "<tool>", "<end>", "<stop>"])
    inner.add_tokens(["<tool_call>", "</tool_call>"])
    return Tokenizer(inner, {"eos_token": ends[0]}, [inner.token_to_id(end) for end in ends])


def answered(template: ToolTemplate, *results: str) -> tuple[list[FunctionCall], list[dict[str, Any]]]:
    calls = [FunctionCall(f"call{number:05}", "add", {"a": number}) for number, _ in enumerate(results)]
    return calls, template.messages(calls, [ToolResult(text, False) for text in results])


@pytest.mark.parametrize("source", [TEMPLATE, chat(KEEPS), chat(DROPS), chat(EMPTY), chat("")])
@pytest.mark.parametrize("results", [("three",), ("hello world", "<tool_call> I am\n")])
def test_what_is_appended_is_what_the_whole_conversation_has_after_the_call(
    source: str, results: tuple[str, ...]
) -> None:
    """Whether a template keeps the reasoning of earlier turns, drops it, or writes an empty one into the last."""
    tokenizer = tokenizer_of("<end>", "<stop>")
    chats = ChatTemplate(source, tokenizer.special_tokens)
    template = ToolTemplate(chats, tokenizer, SCHEMAS)
    calls, messages = answered(template, *results)
    end = tokenizer.id_of("<end>")
    assert end is not None
    suffix = template.suffix(calls, messages, end)
    written = {"function": {"name": "add", "arguments": {"a": 0}}}
    before = [
        {"role": "user", "content": "one and two?"},
        {"role": "assistant", "content": "", "tool_calls": [written]},
    ]
    whole = tokenizer.encode(chats.render([*before, *messages], tools=SCHEMAS), add_special_tokens=False)
    assert len(suffix) > 5 and whole[-len(suffix) :] == suffix and whole[-len(suffix) - 1] == end
    said = "".join(f"<tool>{text}<end>\n" for text in results)
    assert tokenizer.decode(suffix) == f"\n{said}<assistant>"


def test_what_ends_the_models_turn_is_not_written_twice() -> None:
    tokenizer = tokenizer_of("<tool>", "<stop>")
    template = ToolTemplate(ChatTemplate(OBSERVED), tokenizer, SCHEMAS)
    calls, messages = answered(template, "three", "four")
    tool, stop = tokenizer.id_of("<tool>"), tokenizer.id_of("<stop>")
    assert tool is not None and stop is not None
    assert tokenizer.decode(template.suffix(calls, messages, tool)) == "[three][four]<assistant>"
    assert tokenizer.decode(template.suffix(calls, messages, stop)) == "<tool>[three][four]<assistant>"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (chat("").removeprefix(TOOLS), "does not write the tool look into a prompt"),
        (chat("").replace(CALLS, ""), "does not write calls"),
        (chat("").replace("{{ c.function.arguments | tojson }}", "{}"), "does not write arguments of calls"),
        (
            chat("").replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"),
            "does not write results of tools",
        ),
        (chat(LAST), "writes a turn with a call otherwise once its result follows"),
        (chat("{{ raise_exception('no tools') if m.role == 'tool' }}"), "refuses these messages: no tools"),
    ],
)
def test_a_template_that_cannot_go_on_after_a_call_is_refused_with_what_it_lacks(source: str, words: str) -> None:
    tokenizer = tokenizer_of("<end>")
    with pytest.raises(ConfigError, match=words) as caught:
        ToolTemplate(ChatTemplate(source, tokenizer.special_tokens), tokenizer, SCHEMAS)
    assert "\n" not in caught.value.message and caught.value.hint
