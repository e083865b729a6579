"""What a line of a chat is: words for the model, or for the program."""

from __future__ import annotations

import io
import sys

import pytest

from tests.house.tree import ROOT
from tllm.cli.commands.chat import _ask_user, is_command
from tllm.cli.main import main
from tllm.core.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "is_one"),
    [("/new", True), ("/hlep", True), ("/?", True), ("/tmp/file", False), ("/new text", False), ("new", False)],
)
def test_one_word_after_a_slash_is_for_the_program(line: str, is_one: bool) -> None:
    assert is_command(line) == is_one


def test_an_unknown_command_is_not_said_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n/rest\n/new\nHello\n/exit\nnever read"))
    words = ["chat", str(ROOT / "models" / "tiny"), "--quiet", "--max-tokens", "4", "--temperature", "0"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "/new starts over, /exit or Ctrl-D ends; Ctrl-C stops a reply",
        "there is no /rest (/new starts over, /exit or Ctrl-D ends; Ctrl-C stops a reply)",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(words) == 0
    assert capsys.readouterr().out == said.out, "one reply, to Hello"


def test_bytes_that_are_no_text_are_the_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hell\xf6\n"), "utf-8"))
    with pytest.raises(ConfigError, match="is no text: 'utf-8' codec can't decode byte 0xf6"):
        _ask_user()
