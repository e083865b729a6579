"""`LarkRules`: rules of a Lark grammar that leaves a reply free up to a mark and holds it from there on.

The dialect is llguidance's. A lexeme that is lazy ends at the first place where it can, and wins over all others there:
so free text goes on until a mark is whole, wherever tokens cut it, and then only what follows the mark is left. A mark
may also be a special token, which no text is; free text may have all other special tokens in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tllm.text.tokenizer import Tokenizer

ANY = "ANY"
"""Any bytes, also those of a character that is broken off, as a model may write them. The one byte that no text has
begins special tokens in the library.
"""
_BYTE, SPACE = "(?s-u:[\\x00-\\xfe])", "[ \\t\\r\\n]"
_NOSPACE = "(?-u:[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f!-\\xfe])"
GAP = "/[ \\r\\n\\t]{0,4}/"
"""White space that models write between parts of a call. More of it would let a reply go on with blanks for ever."""


class SpecialTokens:
    """A model's special tokens, which no text stands for. Those that end a reply are not free: they come where the
    grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = (token_id for token_id in range(tokenizer.size) if tokenizer.is_special(token_id))
        self._others = [token_id for token_id in special if token_id not in tokenizer.eos_ids]

    def id_of(self, mark: str) -> int | None:
        """The id of a mark that is a special token, None for one that is text."""
        token_id = self._tokenizer.id_of(mark) if mark else None
        return token_id if token_id is not None and self._tokenizer.is_special(token_id) else None

    def others(self, marks: Sequence[str]) -> str:
        """The special tokens beside these marks that do not end a reply, as Lark writes them; "" for none."""
        taken = {self.id_of(mark) for mark in marks}
        return _ranges([token_id for token_id in self._others if token_id not in taken])


class LarkRules:
    """A grammar in the making. `opener` is a mark that means something only where a reply begins; "" for none."""

    def __init__(self, special: SpecialTokens, opener: str = "") -> None:
        self._special, self._opener = special, opener
        self._rules = {ANY: f"/{_BYTE}*/"}

    def text(self, start: str) -> str:
        """The whole grammar of a reply that is this."""
        rules = {"start": start, **self._rules}
        head = '%llguidance {"allow_invalid_utf8": true}\n'
        return head + "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def lazy(self, name: str, body: str) -> str:
        """Add a lexeme that ends where it first can; gives its name."""
        self._rules[f"{name}[lazy]"] = body
        return name

    def rule(self, name: str, body: str) -> str:
        """Add a rule; gives its name."""
        self._rules[name] = body
        return name

    def mark(self, mark: str) -> str:
        """A mark, as text or as its special token."""
        token_id = self._special.id_of(mark)
        return literal(mark) if token_id is None else f"({literal(mark)} | <[{token_id}]>)"

    def until(self, name: str, marks: Sequence[str], free: str = ANY) -> str:
        """A rule for text of the form `free` and the first of these marks after it."""
        text = self.lazy(f"{name}_text", f"{free} ({' | '.join(map(literal, marks))})")
        ids = [token_id for mark in marks if (token_id := self._special.id_of(mark)) is not None]
        tokens = f" | {free} <[{_ranges(ids)}]>" if ids else ""
        return self.rule(name, f"{text}{tokens}")

    def beginning(self, name: str, mark: str) -> str:
        """A rule for a mark with which the reply begins, after white space."""
        return self.until(name, [mark], f"/{SPACE}*/")

    def pieces(self, *marks: str) -> str:
        """Free text up to a special token, any number of times; these marks are none of it as special tokens."""
        others = self._special.others(marks)
        return f"({ANY} <[{others}]>)*" if others else ""

    def first_pieces(self, *marks: str) -> str:
        """The same where a reply begins, where the `opener` is no free text either."""
        pieces, opener = self.pieces(*marks), self._special.id_of(self._opener)
        if opener is None:
            return pieces
        begun = self.rule("BEGUN", f"/{SPACE}*{_NOSPACE}{_BYTE}*/")
        others = self._special.others((*marks, self._opener))
        first = f"{begun} <[{opener}]>" + (f" | {ANY} <[{others}]>" if others else "")
        return f"(({first}) {pieces})?"


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text)


def _ranges(ids: Sequence[int]) -> str:
    """Ids as `3,7-9`."""
    runs: list[list[int]] = []
    for token_id in sorted(set(ids)):
        if runs and token_id == runs[-1][1] + 1:
            runs[-1][1] = token_id
        else:
            runs.append([token_id, token_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
