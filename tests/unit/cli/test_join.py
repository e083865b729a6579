from __future__ import annotations

import io
import sys

import pytest

from tllm.cli.main import main
from tllm.node import worker

TAKEN: list[worker.WorkerSettings] = []


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that only remembers what it was told."""
    TAKEN.clear()
    monkeypatch.setattr(worker, "work", TAKEN.append)
    monkeypatch.delenv("TLLM_JOIN_TOKEN", raising=False)


def test_the_whole_line() -> None:
    words = ["join", "[fe80::1]:7000", "--token", "abc", "--name", "lab-3", "--listen", "10.0.0.3", "--threads", "4"]
    assert main(words) == 0
    known = dict(host="fe80::1", port=7000, token="abc", node="lab-3", listen="10.0.0.3", threads=4)
    assert [worker.WorkerSettings(**known, rejoin=30)] == TAKEN  # type: ignore[arg-type]
    assert main([*words, "--rejoin", "5"]) == 0
    assert TAKEN[1].rejoin == 5


def test_a_token_that_no_process_list_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    assert main(["join", "lab-1:7000", "--token", "-"]) == 0
    monkeypatch.setenv("TLLM_JOIN_TOKEN", "def")
    assert main(["join", "lab-1:7000"]) == 0
    assert [settings.token for settings in TAKEN] == ["abc", "def"]


def test_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "lab-1:7000"]) == 2
    assert "no join token" in capsys.readouterr().err
    assert not TAKEN
