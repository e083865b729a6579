"""A closed terminal is a SIGTERM, and swallows what is still written to it."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Iterator

import pytest

from tllm.cli import hangup


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What is sent to whom."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: seen.append((process, number)))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield seen
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_ends_a_command_in_order(
    ended: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, shown = pty.openpty()
    log, told = os.pipe()
    monkeypatch.setattr(hangup, "STANDARD", (shown, told))
    hangup.end_on_hangup()
    os.close(ours)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(shown, b"step 7")
    signal.raise_signal(signal.SIGHUP)
    assert ended == [(os.getpid(), signal.SIGTERM)]
    assert os.write(shown, b"saved step 7") == 12
    os.write(told, b"saved step 7")
    assert os.read(log, 99) == b"saved step 7", "what is no terminal stays"
    for descriptor in (shown, log, told):
        os.close(descriptor)


def test_a_terminal_that_is_there_goes_on_showing(
    ended: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, shown = pty.openpty()
    monkeypatch.setattr(hangup, "STANDARD", (shown,))
    hangup.end_on_hangup()
    signal.raise_signal(signal.SIGHUP)
    os.write(shown, b"saved")
    assert os.read(ours, 99) == b"saved" and len(ended) == 1
    os.close(ours)
    os.close(shown)


def test_nohup_stays(ended: list[tuple[int, int]]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hangup.end_on_hangup()
    signal.raise_signal(signal.SIGHUP)
    assert not ended
