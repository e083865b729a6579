"""The file of a secret is there whole or not at all, whoever writes it and whatever ends that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tllm.training.questions import shared_secret
from tllm.training.questions.shared_secret import shared_identity


def made_by(monkeypatch: pytest.MonkeyPatch, token: Callable[[int], str]) -> None:
    monkeypatch.setattr(shared_secret, "secrets", SimpleNamespace(token_hex=token))


def test_a_secret_that_was_not_written_is_written_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file was left, of which every later command said that it should let that command write a new one."""
    file = tmp_path / "keys" / "secret"

    def end(nbytes: int) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        made_by(now, end)
        with pytest.raises(KeyboardInterrupt):
            shared_identity(file, "teacher", "tllm teach", make=True)
    assert not list(file.parent.iterdir())
    shared_identity(file, "teacher", "tllm teach", make=True)
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_first_of_two_commands_that_write_a_secret_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"

    def late(nbytes: int) -> str:
        file.write_text("1" * 64)
        file.chmod(0o600)
        return "2" * 64

    made_by(monkeypatch, late)
    shared_identity(file, "teacher", "tllm teach", make=True)
    assert file.read_text() == "1" * 64
