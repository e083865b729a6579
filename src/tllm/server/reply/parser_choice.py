"""Which parsers read a model's replies: chosen by name, or by what its chat template writes.

`ReplyParsers` is chosen once for a server; for each reply it makes a `ReplyParser`, which gives the events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tllm.core.errors import ConfigError, nearest
from tllm.server.reply.call_grammars import HARMONY
from tllm.server.reply.events import ArgumentsPiece, ReasoningPiece, ReplyEvent, ReplyFinish, ToolCallBegin
from tllm.server.reply.reasoning import ReasoningMarks, harmony, is_open_in, with_reasoning
from tllm.server.reply.reply_ids import ReplyIds
from tllm.server.reply.scanner import Parser, Parsing
from tllm.server.reply.tool_formats import (
    Schemas,
    ToolFormat,
    calls_or_form,
    glm45,
    hermes,
    llama3_json,
    mistral,
    plain_reply,
    plain_text,
    qwen3_coder,
)
from tllm.spec.request import Grammar

HARMONY_TOOLS, HARMONY_REASONING = HARMONY, "openai_gptoss"
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
}
THINK, THINK_MISTRAL = ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]")
REASONING_MARKS = {"qwen3": THINK, "deepseek_r1": THINK, "glm45": THINK, "mistral": THINK_MISTRAL}

TOOL_PARSERS = (*TOOL_FORMATS, HARMONY_TOOLS)
REASONING_PARSERS = (*REASONING_MARKS, HARMONY_REASONING)
AUTO, NONE = "auto", "none"

SIGNS_OF_TOOLS = {
    "<|channel|>": HARMONY_TOOLS,
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    "ipython": "llama3_json",
}
"""Texts of chat templates, and the format of calls that each tells; the first that is found counts."""

SIGNS_OF_REASONING = {
    "<|channel|>": HARMONY_REASONING,
    "[THINK]": "mistral",
    "<think>": "qwen3",
    "</think>": "qwen3",
}

WRITTEN_AS_SPECIAL_TOKENS = ("mistral", "llama3_json", HARMONY_TOOLS, HARMONY_REASONING)
"""Formats whose marks are special tokens, which a reply's text must therefore show."""


@dataclass(frozen=True)
class ReplyParsers:
    """The names of the parsers of one server; "" for none."""

    tools: str = ""
    reasoning: str = ""

    @property
    def is_harmony(self) -> bool:
        return self.tools == HARMONY_TOOLS or self.reasoning == HARMONY_REASONING

    @property
    def needs_special_tokens(self) -> bool:
        """Whether marks are special tokens, which decoding must not leave out."""
        return bool({self.tools, self.reasoning} & set(WRITTEN_AS_SPECIAL_TOKENS))

    def free_part(self, prompt: str) -> tuple[str, str]:
        """What a grammar leaves free before a reply: the `free_from` and `free_until` of `Grammar`."""
        marks = REASONING_MARKS.get(self.reasoning)
        if marks is None:
            return "", ""
        is_open = is_open_in(marks, prompt)
        if is_open is None:
            return marks
        return ("", marks.end) if is_open else ("", "")

    def form_reader(self, may_call: bool) -> ToolFormat | None:
        """How a reply is read that is held to a form, or where it `may_call` to calls in this model's format.

        None for the format of this model itself, whose parts say what they are.
        """
        if self.is_harmony:
            return None
        return calls_or_form(self.tools, TOOL_FORMATS[self.tools]) if may_call else plain_reply

    def parser(self, prompt: str, reply: ToolFormat | None = None, schemas: Schemas | None = None) -> ReplyParser:
        """A parser for a reply to this prompt.

        `reply` says how what comes after the reasoning is read: None for the format of this model, where `schemas` are
        the tools that it may call. Without tools there are no calls.
        """
        given = schemas or {}
        if self.is_harmony and reply is None:
            return ReplyParser(lambda scanner: harmony(scanner, may_call=bool(given)))
        named = TOOL_FORMATS.get(self.tools) if given else None
        own = reply or named
        rest: Parser = plain_text if own is None else lambda scanner: own(scanner, given)
        marks = REASONING_MARKS.get(self.reasoning)
        is_open = False if marks is None else is_open_in(marks, prompt)
        if marks is not None and is_open is not False:  # else the prompt has closed the reasoning
            rest = with_reasoning(marks, bool(is_open), rest)
        return ReplyParser(rest)


def choose_parsers(tools: str, reasoning: str, template: str) -> ReplyParsers:
    """The parsers of these names; "auto" finds one by the source of a chat template. ConfigError for another name."""
    found = []
    for option, name, names, signs in (
        ("--tool-call-parser", tools, TOOL_PARSERS, SIGNS_OF_TOOLS),
        ("--reasoning-parser", reasoning, REASONING_PARSERS, SIGNS_OF_REASONING),
    ):
        if name == AUTO:
            name = next((known for sign, known in signs.items() if sign in template), "")
        elif name == NONE:
            name = ""
        elif name not in names:
            raise ConfigError(f"{option} knows no {name!r}", nearest(name, (*names, AUTO, NONE)))
        found.append(name)
    return ReplyParsers(*found)


@dataclass
class ReplyParser:
    """Gives the events of one reply. `max_calls` leaves out all calls after so many, where no parallel ones are wanted.
    `new_id` gives each call its id.

    `is_reasoning`: the last event was of reasoning, and the reply goes on with it.
    """

    parser: Parser
    max_calls: int | None = None
    new_id: Callable[[str], str] = field(default_factory=lambda: ReplyIds().new)
    is_reasoning: bool = False
    num_calls: int = 0
    reasoning_tokens: int = 0
    _parsing: Parsing = field(init=False)

    def __post_init__(self) -> None:
        self._parsing = Parsing(self.parser)

    def push(self, text: str, tokens: int = 0) -> list[ReplyEvent]:
        """The events that follow from more of the reply's text, which so many tokens made."""
        events = self._noted(self._parsing.push(text)) if text else []
        self.reasoning_tokens += tokens if self.is_reasoning else 0
        return events

    def finish(self, reason: str, stop_reason: str | int | None) -> list[ReplyEvent]:
        """The last events."""
        events = self._noted(self._parsing.finish())
        if self.num_calls and reason == "stop":
            reason = "tool_calls"
        return [*events, ReplyFinish(reason, stop_reason)]

    def _noted(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        kept = list[ReplyEvent]()
        for event in events:
            self.is_reasoning = isinstance(event, ReasoningPiece)
            if isinstance(event, ToolCallBegin | ArgumentsPiece):
                if self.max_calls is not None and event.index >= self.max_calls:
                    continue
                if isinstance(event, ToolCallBegin):
                    self.num_calls += 1
                    event = msgspec.structs.replace(event, id=self.new_id("call"))
            kept.append(event)
        return kept


def held_to(grammar: Grammar, free: tuple[str, str]) -> Grammar:
    """The grammar, with a free part before it."""
    return msgspec.structs.replace(grammar, free_from=free[0], free_until=free[1])
