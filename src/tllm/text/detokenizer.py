"""Ids to text as they arrive: what is given out never changes later and never holds half a character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tllm.text.token_bytes import ends_inside_character, starts_inside_character
from tllm.text.tokenizer import Tokenizer

_CONTEXT = 6  # tokens before the first new one that decide its spaces


class Detokenizer:
    """Text of a growing list of ids.

    A decoder may treat the start of a text apart (it strips one space), so new tokens are decoded together with a
    few that came before, and what those alone give is cut off the front. A token that ends inside a UTF-8 character
    waits for the rest. `prompt_ids` are context only: their text is not given out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = self._context(prompt_ids)
        held = self._unfinished(self._window)
        self._read = len(self._window) - held
        self._before = tokenizer.decode(self._window[: self._read])
        self._pending = b"".join(tokenizer.token_bytes(i) for i in self._window[self._read :])

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete, often a few characters, sometimes none."""
        return "".join(self._push(token_id) for token_id in ids)

    def finish(self) -> str:
        """The text still held back, when no token will follow: a broken character shows as U+FFFD."""
        return self._take() if self._read < len(self._window) else ""

    def _push(self, token_id: int) -> str:
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        self._pending += self._tokenizer.token_bytes(token_id)
        if not ends_inside_character(self._pending):
            return self._take()
        # A character that another one broke off will never be whole.
        held = self._unfinished(self._window[self._read :])
        return self._take(held) if 0 < held < len(self._window) - self._read else ""

    def _take(self, held: int = 0) -> str:
        """The text of all tokens but the last ones, which are `held` back."""
        stop = len(self._window) - held
        text = self._tokenizer.decode(self._window[:stop])
        new = text[len(self._before) :]
        fresh = self._tokenizer.decode(self._window[self._read : stop])
        # a window without text would make the next token look like the start of the text
        if fresh:
            del self._window[: self._read]
        self._before = fresh or text
        self._read = len(self._window) - held
        self._pending = b"".join(self._tokenizer.token_bytes(i) for i in self._window[self._read :])
        return new

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last few tokens, from the beginning of a character on."""
        shown = prompt_ids
        if self._skip:
            shown = [i for i in prompt_ids[-4 * _CONTEXT :] if not self._tokenizer.is_special(i)]
        start = max(0, len(shown) - _CONTEXT)
        while start > 0 and starts_inside_character(self._tokenizer.token_bytes(shown[start])):
            start -= 1
        return list(shown[start:])

    def _unfinished(self, ids: Sequence[int]) -> int:
        """How many of the last tokens belong to a character that is not complete yet."""
        for count in range(1, min(4, len(ids)) + 1):
            data = b"".join(self._tokenizer.token_bytes(i) for i in ids[-count:])
            if not starts_inside_character(data):
                return count if ends_inside_character(data) else 0
        return 0
