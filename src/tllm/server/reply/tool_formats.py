"""How model families write calls of tools: a parser for each format, under the name that vLLM has for it.

Each takes the reply's text after its reasoning and gives text, calls and their arguments. What looks like a call and is
none is text. White space around calls is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tllm.server.reply.events import ArgumentsPiece, TextPiece, ToolCallBegin
from tllm.server.reply.json_pieces import is_json, json_call, json_pieces, string_piece
from tllm.server.reply.scanner import Scanner, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's arguments, by its name."""

ToolFormat = Callable[[Scanner, Schemas], Steps[None]]
"""A parser of what comes after the reasoning."""


def plain_text(scanner: Scanner) -> Steps[None]:
    """No calls."""
    yield from scanner.until((), TextPiece)


def plain_reply(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """A reply in which nothing is a call, as a format."""
    yield from plain_text(scanner)


def hermes(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen 2.5 and 3 write."""
    calls = 0
    while (yield from scanner.until(("<tool_call>",), TextPiece, strip=True)):
        begun = scanner.space + "<tool_call>" + (yield from scanner.skip_space())
        refused = yield from json_call(scanner, calls)
        if refused is not None:
            yield TextPiece(begun + refused)
            continue
        calls += 1
        yield from scanner.end("</tool_call>")


def llama3_json(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """A reply that is `{"name": …, "parameters": {…}}`, or several with `;` between them, as Llama 3 writes."""
    calls, space = 0, (yield from scanner.skip_space())
    if (yield from scanner.take("<|python_tag|>")):
        space = yield from scanner.skip_space()
    while True:
        refused = yield from json_call(scanner, calls)
        if refused is not None:
            if space + refused:
                yield TextPiece(space + refused)
            break
        calls += 1
        yield from scanner.skip_space()
        if not (yield from scanner.take(";")):
            break
        space = yield from scanner.skip_space()
    yield from plain_text(scanner)


def mistral(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """`[TOOL_CALLS]` before a JSON list of calls, or before each `name{…}` or `name[ARGS]{…}`, as Mistral writes."""
    calls = 0
    while (yield from scanner.until(("[TOOL_CALLS]",), TextPiece, strip=True)):
        begun = scanner.space + "[TOOL_CALLS]" + (yield from scanner.skip_space())
        if (yield from scanner.take("[")):
            begun += "["
            while True:
                space = yield from scanner.skip_space()
                refused = yield from json_call(scanner, calls)
                if refused is not None:
                    if text := (begun and begun + space) + refused:
                        yield TextPiece(text)
                    break
                calls, begun = calls + 1, ""
                yield from scanner.skip_space()
                if not (yield from scanner.take(",")):
                    break
            if begun:  # it was no list of calls
                continue
            yield from scanner.take("]")
        else:
            name, mark = yield from scanner.text_until(("[ARGS]", "{"))
            if not mark:
                yield TextPiece(begun)
                continue
            if mark == "{":
                scanner.text = mark + scanner.text
            name = name.partition("[CALL_ID]")[0].strip()
            yield ToolCallBegin(calls, name)
            yield from json_pieces(scanner, calls)
            calls += 1
        yield from scanner.skip_space()


class ParameterMarks(NamedTuple):
    """Marks of a format that writes each parameter between tags of its own."""

    call: str
    end_of_name: tuple[str, ...]
    parameter: str
    end_of_key: str
    end_of_value: str
    end_of_call: tuple[str, ...]


QWEN3_CODER = ParameterMarks("<function=", (">",), "<parameter=", ">", "</parameter>", ("</function>", "</tool_call>"))
GLM45 = ParameterMarks(
    "<tool_call>", ("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "</arg_key>", "</arg_value>", ("</tool_call>",)
)


def qwen3_coder(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """`<tool_call><function=f><parameter=p>…</parameter></function></tool_call>`, as Qwen3-Coder and Qwen3.5 write."""
    calls = 0
    while mark := (yield from scanner.until(("<tool_call>", "<function="), TextPiece, strip=True)):
        begun = scanner.space + mark
        if mark == "<tool_call>":
            begun += yield from scanner.skip_space()
            if not (yield from scanner.take("<function=")):
                yield TextPiece(begun)
                continue
            begun += "<function="
        name, found = yield from scanner.text_until(QWEN3_CODER.end_of_name)
        if not found:
            yield TextPiece(begun)
            continue
        yield from _parameters(scanner, QWEN3_CODER, calls, name.strip(), schemas)
        calls += 1
        yield from scanner.end("</tool_call>")


def glm45(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, as GLM 4.5 and later write."""
    calls = 0
    while (yield from scanner.until(("<tool_call>",), TextPiece, strip=True)):
        begun = scanner.space + "<tool_call>" + (yield from scanner.skip_space())
        name, found = yield from scanner.text_until(GLM45.end_of_name)
        if not found or not name.strip():
            yield TextPiece(begun + name + found)
            continue
        if found != "\n":
            scanner.text = found + scanner.text
        yield from _parameters(scanner, GLM45, calls, name.strip(), schemas)
        calls += 1
        yield from scanner.skip_space()


def _parameters(scanner: Scanner, marks: ParameterMarks, index: int, name: str, schemas: Schemas) -> Steps[None]:
    """A call's parameters as one JSON object, a piece for each, and the end of the call."""
    yield ToolCallBegin(index, name)
    properties, separator = _properties(schemas.get(name)), "{"
    while True:
        yield from scanner.skip_space()
        if not (yield from scanner.take(marks.parameter)):
            break
        key, found = yield from scanner.text_until((marks.end_of_key,))
        if marks.end_of_value == "</arg_value>" and found:
            yield from scanner.skip_space()
            yield from scanner.take("<arg_value>")
        value, ended = yield from scanner.text_until((marks.end_of_value,))
        if not ended:
            scanner.text = "" if scanner.is_ended else scanner.text
            return  # the reply broke off: what came of the object stays open
        yield ArgumentsPiece(
            index, f"{separator}{string_piece(key.strip())}: {_json_of(value, properties, key.strip())}"
        )
        separator = ", "
    is_ended = False
    for mark in marks.end_of_call:
        is_ended = is_ended or (yield from scanner.take(mark))
    if is_ended or not scanner.breaks_off((marks.parameter, *marks.end_of_call)):
        yield ArgumentsPiece(index, "{}" if separator == "{" else "}")


def _json_of(value: str, properties: Mapping[str, Any], key: str) -> str:
    """A value as JSON: a text where the schema says so or where it is nothing else, and itself where it is JSON."""
    text = value.removeprefix("\n").removesuffix("\n")
    schema = properties.get(key)
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or not is_json(text):
        lowered = text.strip().lower()
        if kind == "boolean" and lowered in ("true", "false"):
            return lowered
        return string_piece(text)
    return text.strip()


def _properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    given = (schema or {}).get("properties")
    return given if isinstance(given, Mapping) else {}


def call_beginnings(tool_format: str, names: Iterable[str]) -> tuple[str, ...]:
    """The texts with which a reply that is calls of these functions and nothing else begins, in the format of a name.

    Llama 3 writes JSON, as a reply may that calls nothing: only the whole of it up to the arguments tells a call.
    """
    if tool_format == "llama3_json":
        return "<|python_tag|>", *(f'{{"name": {json.dumps(name)}, "parameters": ' for name in names)
    return BEGINNINGS[tool_format]


BEGINNINGS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "glm45": ("<tool_call>",),
}


def calls_or_form(tool_format: str, calls: ToolFormat) -> ToolFormat:
    """A reply that a grammar holds to calls or to a form: how it begins tells, whatever stands in the form's texts."""

    def parse(scanner: Scanner, schemas: Schemas) -> Steps[None]:
        space = yield from scanner.skip_space()
        for mark in call_beginnings(tool_format, schemas):
            if (yield from scanner.comes(mark)):
                yield from calls(scanner, schemas)
                return
        scanner.text = space + scanner.text
        yield from plain_text(scanner)

    return parse


def named_call(name: str) -> ToolFormat:
    """A reply that a grammar holds to the arguments of one function."""

    def parse(scanner: Scanner, schemas: Schemas) -> Steps[None]:
        yield from scanner.skip_space()
        yield ToolCallBegin(0, name)
        yield from json_pieces(scanner, 0)

    return parse


def required_calls(scanner: Scanner, schemas: Schemas) -> Steps[None]:
    """A reply that a grammar holds to a JSON list of calls."""
    yield from scanner.skip_space()
    yield from scanner.take("[")
    calls = 0
    while True:
        yield from scanner.skip_space()
        refused = yield from json_call(scanner, calls)
        if refused is not None:
            return
        calls += 1
        yield from scanner.skip_space()
        if not (yield from scanner.take(",")):
            return
