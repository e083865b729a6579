"""How wide a table may be."""

from __future__ import annotations

import io
import sys

import pytest

from tllm.cli.display.tables import terminal_width


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
