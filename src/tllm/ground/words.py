"""Words for messages: the nearest known key to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word most like `word`, or all of them."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(choices)
