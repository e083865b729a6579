"""Stacks on a signal go to one file, which a process opens once however many commands it runs."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest

from tests.support.process_state import open_files
from tllm.core.stacks import STACKS_VARIABLE, show_stacks_on_signal


def test_the_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stacks.txt"
    monkeypatch.setenv(STACKS_VARIABLE, str(file))
    for _ in range(3):
        show_stacks_on_signal()
    opened = [number for number, name in open_files() if name == str(file)]
    os.kill(os.getpid(), signal.SIGUSR1)
    faulthandler.unregister(signal.SIGUSR1)
    for number in opened:
        os.close(number)
    assert len(opened) == 1 and "test_the_file_is_opened_once" in file.read_text()
