"""`HeldCalls`: the grammar of a reply in which the model decides whether it calls, made and checked once for its tools.

A tool with `strict` true is held to its schema, or the request is refused. Without `strict` the schema holds where it
can be followed, else the arguments are any JSON object; with `strict` false they always are.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tllm.core.errors import RequestError
from tllm.server.reply.call_grammars import call_grammar
from tllm.server.reply.lark_rules import SpecialTokens
from tllm.server.reply.parameter_grammar import why_not_in_tags
from tllm.spec.request import Grammar
from tllm.text.grammar import check_grammar
from tllm.text.tokenizer import Tokenizer

KEPT = 32
"""Grammars that are kept: each turn of a chat has the same tools."""

IN_TAGS = ("qwen3_coder", "glm45")
"""Formats that write parameters between tags."""

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_log = logging.getLogger("tllm.server")


class HeldTool(NamedTuple):
    """A tool, and the schema of its arguments, which are always an object."""

    name: str
    arguments: Mapping[str, Any]
    strict: bool | None = None


class HeldCalls:
    """Makes the grammars of one server, whose model writes calls in `tool_format`."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str) -> None:
        self._tokenizer, self._format = tokenizer, tool_format
        self._special: SpecialTokens | None = None
        self._made: OrderedDict[tuple[str, bool, tuple[str, str]], Grammar | None] = OrderedDict()

    async def grammar(self, tools: Sequence[HeldTool], parallel: bool, reasoning: tuple[str, str]) -> Grammar | None:
        """What holds the calls of a reply, aside from the event loop; None where nothing does.

        `reasoning` is what stays free before the reply (`free_from`, `free_until`). RequestError for a strict tool
        whose schema cannot be followed.
        """
        key = (json.dumps(tools), parallel, reasoning)
        if key not in self._made:
            self._made[key] = await asyncio.to_thread(self._make, tools, parallel, reasoning)
        self._made.move_to_end(key)
        if len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[key]

    def _make(self, tools: Sequence[HeldTool], parallel: bool, reasoning: tuple[str, str]) -> Grammar | None:
        held: dict[str, Mapping[str, Any]] = {}
        for name, schema, strict in tools:
            why = "" if strict is False else self._why_not(name, schema, reasoning)
            if why and strict:
                message = f"the tool {name} is strict and its schema cannot be followed: {why}"
                raise RequestError(message, "simplify it, or leave strict out", "tools")
            if why:
                _log.warning("arguments of the tool %s are held to be a JSON object, not by its schema: %s", name, why)
            held[name] = ANY_ARGUMENTS if why or strict is False else schema
        is_strict = any(tool.strict for tool in tools)
        grammar = self._of(held, parallel, reasoning)
        why = _fault(grammar)
        if why and is_strict:
            raise RequestError(f"the tools together cannot be followed: {why}", "offer fewer of them", "tools")
        if why:
            _log.warning("calls of %d tools are held to be JSON objects, not by their schemas: %s", len(held), why)
            grammar = self._of(dict.fromkeys(held, ANY_ARGUMENTS), parallel, reasoning)
        if grammar is None and is_strict:
            raise RequestError("a tool is strict and this model's calls cannot be held", "leave strict out", "tools")
        return grammar

    def _why_not(self, name: str, schema: Mapping[str, Any], reasoning: tuple[str, str]) -> str:
        """Why the arguments of one tool cannot be held; "" where they can."""
        why = why_not_in_tags(schema) if self._format in IN_TAGS else ""
        return why or _fault(self._of({name: schema}, False, reasoning))

    def _of(self, held: Mapping[str, Mapping[str, Any]], parallel: bool, reasoning: tuple[str, str]) -> Grammar | None:
        if self._special is None:
            self._special = SpecialTokens(self._tokenizer)
        text = call_grammar(self._format, self._special, held, parallel, reasoning)
        return Grammar(kind="grammar", text=text) if text else None


def _fault(grammar: Grammar | None) -> str:
    """What is wrong with a grammar, in words; "" for nothing."""
    try:
        if grammar is not None:
            check_grammar(grammar, "tools")
    except RequestError as error:
        return error.message
    return ""
