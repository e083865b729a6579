"""How wide a table may be."""

from __future__ import annotations

import io
import sys

import pytest

from tllm.cli.display.tables import terminal_width, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Proxy(io.TextIOBase):
    """What older rich puts in the place of sys.stdout while a live display is shown."""

    @property
    def rich_proxied_file(self) -> io.StringIO:
        return Terminal()


def test_a_terminal_is_seen_through_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    for out, width in ((Terminal(), 70), (Proxy(), 70), (io.StringIO(), None)):
        monkeypatch.setattr(sys, "stdout", out)
        assert terminal_width() == width


def test_prose_ends_between_words_on_a_terminal_and_is_one_line_elsewhere() -> None:
    text = "hint: give the address that was printed\n  and a second line"
    assert wrapped(text, None) == text
    assert wrapped(text, 24) == "hint: give the address\n  that was printed\n  and a second line"
    assert wrapped("a-word-that-is-longer-than-a-line", 20) == "a-word-that-is-longer-than-a-line"
