"""Lines that a command logs while it streams a text."""

from __future__ import annotations

import io
import logging

import pytest

from tllm.cli.display.logs import BesideText


class Terminal(io.StringIO):
    """Or what is piped."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_text_seen", "is_log_seen", "begins"), [(True, True, "\n"), (True, False, ""), (False, True, "")]
)
def test_a_line_stands_on_its_own_where_a_terminal_shows_both(
    is_text_seen: bool, is_log_seen: bool, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, log = Terminal(is_text_seen), Terminal(is_log_seen)
    monkeypatch.setattr("sys.stdout", text)
    monkeypatch.setattr("sys.stderr", log)
    BesideText().emit(logging.LogRecord("tllm", logging.WARNING, "", 0, "lost local-%d", (1,), None))
    assert log.getvalue() == f"{begins}lost local-1\n" and not text.getvalue()
