"""What is said to the operator never ends what it is said of."""

from __future__ import annotations

import sys

import pytest

from tllm.core.print_line import print_line


def test_a_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("serving")
    assert capsys.readouterr().out == "serving\n"


def test_a_full_disk_behind_stdout_is_told_in_the_log_without_the_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        print_line("tllm join HOST --token SECRET")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
    assert caplog.messages == ["a line for the operator could not be printed: No space left on device"]
