"""Heads that two readers could take for different requests, and JSON that takes more room than it looks."""

from __future__ import annotations

import random
import time

import pytest

from tllm.server.http.errors import HttpError
from tllm.server.http.json_size import check_json_size
from tllm.server.http.request_head import head_fault

START = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
END = b"\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (START + b"Content-Length: 3\r\nTransfer-Encoding: chunked" + END, "together"),
        (START + b"transfer-encoding: chunked\r\nX: y\r\nCONTENT-LENGTH: 3" + END, "together"),
        (START + b"Content-Length: 3\r\nContent-Length: 3" + END, "twice"),
        (START + b"Content-Length : 3\r\nContent-Length: 4" + END, "twice"),
        (START + b"Content-Length: 3, 3" + END, "not one number"),
        (START + b"Content-Length: +3" + END, "not one number"),
        (START + b"Content-Length:" + END, "not one number"),
        (START + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity" + END, "twice"),
        (START + b"X: a\r\n b" + END, "folded"),
        (START + b"X: a\r\n\tContent-Length: 3" + END, "folded"),
        (START.replace(b"\r\n", b"\n") + b"\n", "line feed"),
        (START + b"X: a\nContent-Length: 3" + END, "line feed"),
        (START + b"X: a\r\n\n", "line feed"),
        (START + b"X: a\rContent-Length: 3" + END, "carriage return"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked" + END, "1.0"),
        (START + b"".join(b"X%d: y\r\n" % i for i in range(256)) + b"\r\n", "257 headers or more, at most 256"),
    ],
)
def test_what_could_be_read_otherwise_is_refused(head: bytes, words: str) -> None:
    assert words in head_fault(head, 256)


@pytest.mark.parametrize(
    "head",
    [
        START + b"\r\n",
        START + b"Content-Length:3 " + END,
        START + b"Content-Length: 3" + END + b"a\nb\r\n c",
        START + b"Transfer-Encoding: chunked" + END + b"3\nabc\nContent-Length: 3",
        START + b"X-Content-Length: 3\r\nContent-Length: 3" + END,
        START + b"X: Content-Length: 3\r\nContent-Length: 3" + END,
        START + b"".join(b"X%d: y\r\n" % i for i in range(255)) + b"\r\n",
    ],
)
def test_what_is_plain_is_not(head: bytes) -> None:
    assert head_fault(head, 256) == ""


def plain_size(text: str) -> tuple[int, int]:
    """The slow way: depth and number of containers, one character after another."""
    depth = deepest = containers = place = 0
    while place < len(text):
        character = text[place]
        if character == '"':
            place += 1
            while place < len(text) and text[place] != '"':
                place += 2 if text[place] == "\\" else 1
        elif character in "[{":
            depth, containers = depth + 1, containers + 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
        place += 1
    return deepest, containers


def test_sizes_are_those_of_the_slow_way() -> None:
    dice = random.Random("json")

    def value(depth: int) -> str:
        kind = dice.randrange(6) if depth else dice.randrange(3)
        if kind == 0:
            return dice.choice(["1", "null", "-2.5e3"])
        if kind < 3:
            return '"' + "".join(dice.choice(["a", "[", "}", "\\\\", '\\"', "\\n", "é"]) for _ in range(6)) + '"'
        inner = [value(depth - 1) for _ in range(dice.randrange(4))]
        if kind < 5:
            return "[" + ", ".join(inner) + "]"
        return "{" + ", ".join(f'"k[{i}": {one}' for i, one in enumerate(inner)) + "}"

    for _ in range(500):
        text = value(8)
        depth, containers = plain_size(text)
        check_json_size(text.encode(), max(1, depth), max(1, containers))
        if depth > 1:
            with pytest.raises(HttpError, match=f"nested {depth} deep or more, at most {depth - 1}"):
                check_json_size(text.encode(), depth - 1, containers)
        if containers > 1:
            with pytest.raises(HttpError, match=f"{containers} objects and lists, at most {containers - 1}"):
                check_json_size(text.encode(), depth, containers - 1)


@pytest.mark.parametrize(
    "body",
    [b'"' + b'\\"' * 100_000, b'"\\' * 100_000, b'["' + b'\\"' * 100_000, b'"",' * 1_000_000],
    ids=lambda body: body[:6],
)
def test_a_body_is_read_once_however_its_quotes_are(body: bytes) -> None:
    """A quote that begins a text without an end had the whole rest read, and the next quote again: 80 KB took 70 s, and
    these would take minutes."""
    began = time.thread_time()
    check_json_size(body, 1, 1)
    assert time.thread_time() - began < 10, "it takes a fraction of a second"
