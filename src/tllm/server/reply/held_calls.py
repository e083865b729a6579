"""`HeldCalls`: the grammar of a reply in which the model decides whether it calls, made and checked once for its tools.

What calls nothing is free, or has a form that is asked for as well. A tool with `strict` true is held to its schema, or
the request is refused. Without `strict` the schema holds where it can be followed, else the arguments are any JSON
object; with `strict` false they always are.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tllm.core.errors import RequestError, counted
from tllm.server.reply.call_grammars import HARMONY, call_grammar
from tllm.server.reply.lark_rules import SpecialTokens
from tllm.server.reply.parameter_grammar import why_not_in_tags
from tllm.server.reply.tool_formats import call_beginnings
from tllm.spec.request import Grammar
from tllm.text.grammar import as_part, can_start_with, check_grammar
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


class AskedForm(NamedTuple):
    """The form that a request asks for, and the field that says it."""

    grammar: Grammar
    param: str


class HeldCalls:
    """Makes the grammars of one server, whose model writes calls in `tool_format`."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str) -> None:
        self._tokenizer, self._format = tokenizer, tool_format
        self._special: SpecialTokens | None = None
        self._made: OrderedDict[tuple[object, ...], Grammar | None] = OrderedDict()

    async def grammar(
        self,
        tools: Sequence[HeldTool],
        parallel: bool,
        reasoning: tuple[str, str],
        form: AskedForm | None = None,
    ) -> Grammar | None:
        """What holds the calls of a reply, aside from the event loop; None where nothing does.

        `reasoning` is what stays free before the reply (`free_from`, `free_until`), and `form` that of a reply without
        calls, which was checked. RequestError for a strict tool whose schema cannot be followed, and for a form that
        cannot be told from calls, or not be followed beside them.
        """
        key = (json.dumps(tools), parallel, reasoning, form)
        if key not in self._made:
            self._made[key] = await asyncio.to_thread(self._make, tools, parallel, reasoning, form)
        self._made.move_to_end(key)
        if len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[key]

    def _make(
        self, tools: Sequence[HeldTool], parallel: bool, reasoning: tuple[str, str], form: AskedForm | None
    ) -> Grammar | None:
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
        grammar = self._of(held, parallel, reasoning) if held else None
        why = _fault(grammar)
        if why and is_strict:
            raise RequestError(f"the tools together cannot be followed: {why}", "offer fewer of them", "tools")
        if why:
            calls = f"calls of {counted(len(held), 'tool')}"
            _log.warning("%s are held to be JSON objects, not by their schemas: %s", calls, why)
            held = dict.fromkeys(held, ANY_ARGUMENTS)
            grammar = self._of(held, parallel, reasoning)
        if form is not None:
            grammar = self._of(held, parallel, reasoning, self._told_apart(form, held))
            if why := _fault(grammar):
                message = f"{form.param} cannot be followed beside the tools: {why}"
                raise RequestError(message, "simplify the form, or offer fewer tools", form.param)
        if grammar is None and is_strict:
            raise RequestError("a tool is strict and this model's calls cannot be held", "leave strict out", "tools")
        if grammar is None and form is not None and held:
            message = "this model's tokenizer has no tokens that tell calls from text, and the text is to have a form"
            raise RequestError(message, f"leave {form.param} or the tools out", form.param)
        return grammar

    def _told_apart(self, form: AskedForm, names: Iterable[str]) -> str:
        """The form as a part of the grammar, with no text that begins as a call does."""
        grammar, begins = form.grammar, () if self._format == HARMONY else call_beginnings(self._format, names)
        if begins and can_start_with(grammar, begins):
            grammar = _without_parameters(grammar)
            if begin := can_start_with(grammar, begins):
                raise RequestError(
                    f"a text in the form of {form.param} may begin with {begin}, which begins a call of this model",
                    "give an object's schema additionalProperties: false, or leave the tools out",
                    form.param,
                )
        return as_part(grammar, form.param)

    def _why_not(self, name: str, schema: Mapping[str, Any], reasoning: tuple[str, str]) -> str:
        """Why the arguments of one tool cannot be held; "" where they can."""
        why = why_not_in_tags(schema) if self._format in IN_TAGS else ""
        return why or _fault(self._of({name: schema}, False, reasoning))

    def _of(
        self, held: Mapping[str, Mapping[str, Any]], parallel: bool, reasoning: tuple[str, str], form: str = ""
    ) -> Grammar | None:
        if self._special is None:
            self._special = SpecialTokens(self._tokenizer)
        text = call_grammar(self._format, self._special, held, parallel, reasoning, form)
        return Grammar(kind="grammar", text=text) if text else None


def _without_parameters(form: Grammar) -> Grammar:
    """The form, whose objects have no member `parameters` unless it names one anywhere: then a call of Llama 3 is none
    of them."""
    schema = msgspec.json.decode(form.text) if form.kind == "json_schema" else None
    if not isinstance(schema, dict) or _names_parameters(schema):
        return form
    schema["properties"] = {**(schema.get("properties") or {}), "parameters": False}
    return msgspec.structs.replace(form, text=msgspec.json.encode(schema).decode())


def _names_parameters(schema: Any) -> bool:
    """Whether `properties` or `required` of a schema or any within it name `parameters`."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            # Members may be called so too, and be true or false.
            if any(
                "parameters" in named
                for key in ("properties", "required")
                if isinstance(named := one.get(key), dict | list)
            ):
                return True
            left += one.values()
        elif isinstance(one, list):
            left += one
    return False


def _fault(grammar: Grammar | None) -> str:
    """What is wrong with a grammar, in words; "" for nothing."""
    try:
        if grammar is not None:
            check_grammar(grammar, "the grammar")
    except RequestError as error:
        return error.message
    return ""
