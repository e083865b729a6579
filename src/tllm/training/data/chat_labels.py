"""Encodes a conversation, and labels the tokens that the model says: its turns, and the token that ends each of them.

The ids are those of the whole conversation's text. What the model says is found in that text: by the template's own
`{% generation %}` marks where it has them, else from what the template makes of the conversation's beginnings. A turn
of the assistant with `"train": false`, `"training": false` or `"weight": 0` is read and not learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tllm.core.errors import RequestError, counted
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
BEGIN, END = "\ue010", "\ue011"  # private-use characters, put around what the model says and taken out again
TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
MARKED = re.compile(f"[{BEGIN}{END}]")
HINT = "put {% generation %} … {% endgeneration %} around what the assistant says in the chat template"


class ChatTurn(NamedTuple):
    """Characters [start, stop) of the text. `closed`: it stops at exactly `stop`, else at a token that ends a turn."""

    start: int
    stop: int
    closed: bool


class ChatEncoder:
    """Encodes conversations by one template and tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        source = TAG.sub(_with_mark, template.source)
        self._marked = ChatTemplate(source, tokenizer.special_tokens) if source != template.source else None

    def encode(self, messages: Messages, tools: Messages | None = None, first: int = 0) -> tuple[list[int], list[bool]]:
        """Token ids of the conversation, and for each whether the model says it; `RequestError` where that is unclear.

        A token belongs to where it begins. A turn goes up to its first token that ends a reply, if it has one. Of the
        messages before number `first` nothing counts as said: they are a prompt. Nor do turns that are not to be
        learned.
        """
        chosen = _chosen(messages)
        text = self._render(messages, tools, prompt=False)
        encoding = self._tokenizer.inner.encode(text, add_special_tokens=False)
        said = [False] * len(encoding.ids)
        marked = self._marked_turns(text, messages, tools)
        begin = self._start(text, messages[:first], tools) if first else 0
        turns = self._turns(text, messages, tools) if marked is None else marked
        if all(chosen):
            chosen = [True] * len(turns)
        elif len(turns) != len(chosen):
            raise RequestError(
                f"the chat template marks {counted(len(turns), 'turn')}, the conversation has {len(chosen)} "
                "of the assistant, and not all of them are to be learned",
                "let the template's {% generation %} mark each turn once",
            )
        for turn, is_chosen in zip(turns, chosen, strict=True):
            if turn.stop <= begin or not is_chosen:
                continue
            inside = [i for i, (start, _) in enumerate(encoding.offsets) if turn.start <= start < turn.stop]
            ends = [i for i in inside if encoding.ids[i] in self._tokenizer.eos_ids] if marked is None else []
            if not turn.closed and not ends:
                raise RequestError("the chat template does not show where a turn of the assistant ends", HINT)
            for i in inside:
                said[i] = not ends or i <= ends[0]
        return encoding.ids, said

    def _marked_turns(self, text: str, messages: Messages, tools: Messages | None) -> list[ChatTurn] | None:
        """The turns by the template's marks; None without marks, or where putting them in changes the text."""
        if self._marked is None:
            return None
        parts = MARKED.split(self._marked.render(messages, tools=tools, add_generation_prompt=False))
        if "".join(parts) != text or len(parts) % 2 == 0:
            return None
        bounds = [0]
        for part in parts:
            bounds.append(bounds[-1] + len(part))
        return [ChatTurn(bounds[i], bounds[i + 1], True) for i in range(1, len(parts), 2)]

    def _turns(self, text: str, messages: Messages, tools: Messages | None) -> list[ChatTurn]:
        """The assistant's turns: each from the end of its generation prompt to where the next message begins."""
        numbers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        starts = [self._start(text, messages[:i], tools) for i in numbers]
        turns = []
        for place, i in enumerate(numbers):
            whole = self._render(messages[: i + 1], tools, prompt=False)
            if text.startswith(whole):
                turns.append(ChatTurn(starts[place], len(whole), True))
            else:  # the template shows a last turn in another way, as those that drop earlier reasoning do
                turns.append(ChatTurn(starts[place], [*starts, len(text)][place + 1], False))
        return turns

    def _start(self, text: str, before: Messages, tools: Messages | None) -> int:
        """Where the model's words begin: after the generation prompt, or after what history keeps of it."""
        prompt = self._render(before, tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        told = self._render(before, tools, prompt=False)
        if not text.startswith(told):
            raise RequestError(
                "the chat template shows the messages before a turn of the assistant in another way once it is there",
                HINT,
            )
        same = zip(text, prompt, strict=False)
        shared = next((i for i, (ours, theirs) in enumerate(same) if ours != theirs), min(len(text), len(prompt)))
        return max(shared, len(told))

    def _render(self, messages: Messages, tools: Messages | None, prompt: bool) -> str:
        return self._template.render(messages, tools=tools, add_generation_prompt=prompt)


def _chosen(messages: Messages) -> list[bool]:
    """Of each turn of the assistant, whether it is to be learned. `train` and `training` are what Axolotl and others
    call it, `weight` is OpenAI's; RequestError for values that they do not have."""
    chosen = []
    for number, message in enumerate(messages):
        wishes = [(key, message[key]) for key in ("train", "training", "weight") if message.get(key) is not None]
        for key, wish in wishes:
            if not (isinstance(wish, bool) if key != "weight" else wish in (0, 1)):
                raise RequestError(
                    f"{key} of message {number} is {wish!r}", "give 0 or 1" if key == "weight" else "give true or false"
                )
        if message.get("role") == "assistant":
            chosen.append(all(wish for _, wish in wishes))
        elif any(wish for _, wish in wishes):
            raise RequestError(
                f"message {number} of the role {message.get('role')!r} is to be learned",
                "only the assistant's turns are",
            )
    return chosen


def _with_mark(tag: re.Match[str]) -> str:
    """The same tag with a mark on its inner side's edge; the outer tags take over its trimming of white space."""
    left, end, right = tag.groups(default="")
    if end:
        return f"{{%{left} endgeneration %}}{{{{ '{END}' }}}}{{% if true %}}{{% endif {right}%}}"
    return f"{{%{left} if true %}}{{% endif %}}{{{{ '{BEGIN}' }}}}{{% generation {right}%}}"
