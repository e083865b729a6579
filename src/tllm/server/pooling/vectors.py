"""Vectors that prompts come to: cut, normalised, compared, and written in base64. In float64, and plain Python."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

Vector = tuple[float, ...]


def embedding(values: Sequence[float], normalize: bool, dimensions: int | None = None) -> Vector:
    """A pooled prompt as an embedding: its first `dimensions` numbers (2205.13147), of length 1 if asked for.

    A vector of zeros stays one.
    """
    kept = tuple(values[:dimensions])
    length = math.sqrt(math.fsum(value * value for value in kept)) if normalize else 0.0
    return tuple(value / length for value in kept) if length else kept


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them has no direction."""
    lengths = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(x * x for x in b))
    value = math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
    return max(-1.0, min(1.0, value))


def as_float32(vector: Sequence[float]) -> bytes:
    """Its numbers in float32, little end first, as replies have them in either encoding."""
    return struct.pack(f"<{len(vector)}f", *vector)


def as_list(vector: Sequence[float]) -> list[float]:
    """The same numbers as a list."""
    return list(struct.unpack(f"<{len(vector)}f", as_float32(vector)))


def as_base64(vector: Sequence[float]) -> str:
    """The same numbers as a text."""
    return base64.b64encode(as_float32(vector)).decode()
