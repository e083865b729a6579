from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.node.visits import node
from tllm.cli.commands import profile
from tllm.cli.main import main
from tllm.planner.cluster.profile import LoopbackWire, Profile, read_profile


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """What is measured."""
    profiles = [profile.profile_of(node("here", ""), LoopbackWire(2e-5, 1e-6, 1.5e9))]
    monkeypatch.setattr(profile, "measured", lambda seconds, threads: profiles[0])
    return profiles


def test_what_is_shown(made: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "box: 8 cores, 8 threads used" in shown
    assert "read at 20.0 GB/s, copied at 30.0 GB/s" in shown
    assert "20 µs one way, 1500 MB/s" in shown
    assert "too low" not in shown
    assert shown.splitlines()[-2].split() == ["float32", "1024", "100.0"]


def test_a_busy_machine_is_said(made: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    made[0] = profile.profile_of(node("here", "", load=6.0), None)
    assert main(["profile"]) == 0
    shown = capsys.readouterr()
    assert "other programs kept 6.0 processors busy: these speeds are too low" in shown.out
    assert "up to 60 s" in shown.err


def test_the_file(made: list[Profile], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", str(tmp_path / "p.json"), "--json", "--quiet"]) == 0
    assert read_profile(tmp_path / "p.json") == made[0]
    assert capsys.readouterr().out == (tmp_path / "p.json").read_text()
    assert made[0].date == "2026-09-21T14:13:20+00:00"


def test_a_file_that_cannot_be_written(made: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", "/nowhere/at/all/p.json", "--quiet"]) == 2
    assert "cannot write" in capsys.readouterr().err
