"""The model's reasoning, split off from its reply; and harmony, where every part of a reply says what it is."""

from __future__ import annotations

import re
from typing import NamedTuple

from tllm.server.reply.events import ReasoningPiece, TextPiece, ToolCallBegin
from tllm.server.reply.json_pieces import json_pieces
from tllm.server.reply.scanner import Parser, Scanner, Steps

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class ReasoningMarks(NamedTuple):
    """The texts around reasoning."""

    begin: str
    end: str


def with_reasoning(marks: ReasoningMarks, is_open: bool, rest: Parser) -> Parser:
    """A parser of reasoning and then of the `rest`. `is_open`: the prompt has begun the reasoning already.

    White space around the reasoning is left out. A reply that does not begin with the mark has none.
    """

    def parse(scanner: Scanner) -> Steps[None]:
        space = ""
        if not is_open:
            space = yield from scanner.skip_space()
        if is_open or (yield from scanner.take(marks.begin)):
            yield from scanner.skip_space()
            yield from scanner.take(marks.begin)  # some models repeat what the prompt has begun
            yield from scanner.skip_space()
            if not (yield from scanner.until((marks.end,), ReasoningPiece, strip=True)):
                return
            yield from scanner.skip_space()
        elif space:
            scanner.text = space + scanner.text
        yield from rest(scanner)

    return parse


def is_open_in(marks: ReasoningMarks, prompt: str) -> bool | None:
    """Whether a prompt leaves the reasoning open. None where it says nothing, False where it has closed it."""
    tail = prompt.rstrip()
    if tail.endswith(marks.begin):
        return True
    return False if tail.endswith(marks.end) else None


def is_message_open(prompt: str) -> bool:
    """Whether a prompt for gpt-oss ends inside a message, which the reply goes on with."""
    return prompt.rfind("<|message|>") > max(prompt.rfind(mark) for mark in HARMONY_ENDS)


def harmony(scanner: Scanner, may_call: bool) -> Steps[None]:
    """gpt-oss: `<|channel|>NAME to=functions.f <|message|>…<|end|>`, and so on; the prompt has written the start.

    The channel `analysis` is reasoning, a message to a function is a call where there are any to call, and all else is
    text.
    """
    calls, ended = 0, ""
    while True:
        header, found = yield from scanner.text_until(("<|message|>",))
        if not found:
            is_header = ended == "<|start|>" or any(mark in scanner.text for mark in ("<|start|>", "<|channel|>"))
            if scanner.text.strip() and not is_header:  # else the reply was cut there
                yield from scanner.until((), TextPiece)
            return
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and may_call:
            yield ToolCallBegin(calls, recipient[1])
            yield from json_pieces(scanner, calls)
            calls += 1
            ended = (yield from scanner.text_until(HARMONY_ENDS))[1]
        elif channel is not None and channel[1] == "analysis":
            ended = yield from scanner.until(HARMONY_ENDS, ReasoningPiece)
        else:
            ended = yield from scanner.until(HARMONY_ENDS, TextPiece)
        if not ended:
            return
