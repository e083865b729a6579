"""JSON read while it comes: a value's own text in pieces, and a call that is written as an object.

Nothing is parsed twice: a value's end is found by its quotes and brackets, and its text is passed on as it is.
"""

from __future__ import annotations

import re

import msgspec

from tllm.core.errors import UNREADABLE
from tllm.server.reply.events import ArgumentsPiece, ToolCallBegin
from tllm.server.reply.scanner import MAX_HELD, Scanner, Steps

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\],\s]')
NAME_KEYS, ARGUMENT_KEYS = ("name",), ("arguments", "parameters")


class JsonValue:
    """Finds where one JSON value ends, in text that comes in pieces. It trusts the brackets and checks no more."""

    def __init__(self) -> None:
        self.is_ended = False
        self._depth = 0
        self._in_string = self._is_escaped = self._is_begun = False

    def read(self, text: str) -> int:
        """How many characters of this text are the value's."""
        at = 0
        while at < len(text) and not self.is_ended:
            at = self._in(text, at) if self._in_string else self._out(text, at)
        return at

    def _in(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._in_string, self.is_ended = False, self._depth == 0
        return found.end()

    def _out(self, text: str, at: int) -> int:
        found = _OUTSIDE.search(text, at)
        if found is None or (found.start() > at and self._depth == 0 and not self._is_begun):
            self._is_begun = True
            return len(text) if found is None else found.start()
        mark = found[0]
        if self._depth == 0 and self._is_begun and mark not in '"{[':
            self.is_ended = True  # what follows a number or a word is no part of it
            return found.start()
        self._is_begun = True
        if mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.is_ended = self._depth <= 0
        return found.end()


def json_pieces(scanner: Scanner, index: int | None) -> Steps[str]:
    """Read one value after white space, in pieces as arguments of the call `index`; gives its text if that is None."""
    yield from scanner.skip_space()
    value, whole = JsonValue(), ""
    while True:
        most = MAX_HELD - len(whole) if index is None else len(scanner.text)
        count = value.read(scanner.text[:most])
        piece, scanner.text = scanner.text[:count], scanner.text[count:]
        if piece and index is not None:
            yield ArgumentsPiece(index, piece)
        else:
            whole += piece
        if value.is_ended or scanner.is_ended or len(whole) == MAX_HELD:
            return whole
        yield None


def json_call(scanner: Scanner, index: int) -> Steps[str | None]:
    """Read `{"name": …, "arguments": {…}}` as a call: arguments in pieces, once the name is known.

    Gives None, or the text of what turned out to be no call, all of it held back until then.
    """
    held, name, arguments, is_begun = "", "", "", False
    if not (yield from scanner.take("{")):
        return held
    held = "{"
    while True:
        held += yield from scanner.skip_space()
        if (yield from scanner.take("}")):
            held += "}"
            break
        if (yield from scanner.take(",")):
            held += "," + (yield from scanner.skip_space())
        key = yield from json_pieces(scanner, None)
        held += key + (yield from scanner.skip_space())
        if not key.startswith('"') or not (yield from scanner.take(":")):
            break
        held += ":" + (yield from scanner.skip_space())
        is_arguments = _text(key) in ARGUMENT_KEYS
        if is_arguments and name and not is_begun:
            is_begun = True
            yield ToolCallBegin(index, name)
            yield from json_pieces(scanner, index)
            continue
        value = yield from json_pieces(scanner, None)
        held += value
        if _text(key) in NAME_KEYS and not name:
            name = _text(value)
        elif is_arguments and not is_begun:
            arguments = value
    if is_begun:
        return None
    if not name or not held.endswith("}"):
        return held
    yield ToolCallBegin(index, name)
    yield ArgumentsPiece(index, arguments or "{}")
    return None


def _text(value: str) -> str:
    """A JSON string's text; "" for anything else."""
    try:
        return msgspec.json.decode(value, type=str)
    except UNREADABLE:
        return ""


def string_piece(text: str) -> str:
    """A text as JSON."""
    return msgspec.json.encode(text).decode()


def is_json(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        msgspec.json.decode(text)
    except UNREADABLE:
        return False
    return True
