"""The raw bytes each token stands for, read off the kind of decoder a tokenizer has."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes are themselves, the others are numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return table


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flat(inner)]
    return [decoder]


class TokenBytes:
    """Gives the bytes of one token, without what only shows between tokens (a space stripped at the very start)."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        parts = _flat(json.loads(inner.decoder.__getstate__())) if inner.decoder is not None else []
        kinds = {part["type"] for part in parts}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replace: list[tuple[str, str]] = []
        for part in parts:
            if part["type"] == "Metaspace":
                self._replace.append((part["replacement"], " "))
            elif part["type"] == "Replace" and "String" in part["pattern"]:
                self._replace.append((part["pattern"]["String"], part["content"]))
            elif part["type"] == "BPEDecoder" and part.get("suffix"):
                self._replace.append((part["suffix"], " "))

    def __call__(self, token_id: int) -> bytes:
        """Bytes of the token; none for an id outside the vocabulary."""
        piece = self._inner.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            mapped = [table.get(char) for char in piece]
            # an added token such as <｜user｜> holds characters outside the alphabet and stands for itself
            return piece.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.match(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            piece = piece.replace(old, new)
        return piece.encode()


def ends_inside_character(data: bytes) -> bool:
    """Whether `data` ends with the beginning of a UTF-8 character that more bytes could complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if 0x80 <= byte < 0xC0:
            continue
        width = 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 1
        return width > back and _may_continue(data[-back:])
    return False


def _may_continue(start: bytes) -> bool:
    """Rule out the second bytes that no character has (overlong forms, surrogates, above U+10FFFF)."""
    if len(start) < 2:
        return True
    low, high = {
        0xE0: (0xA0, 0xBF),
        0xED: (0x80, 0x9F),
        0xF0: (0x90, 0xBF),
        0xF4: (0x80, 0x8F),
    }.get(start[0], (0x80, 0xBF))
    return low <= start[1] <= high


def starts_inside_character(data: bytes) -> bool:
    """Whether `data` begins with a continuation byte."""
    return bool(data) and 0x80 <= data[0] < 0xC0
