from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.unit.node.visits import node
from tllm.cli.commands import profile
from tllm.cli.main import main
from tllm.kernels.autotune import VARIABLE
from tllm.node.machine.machine_facts import NodeProbe
from tllm.planner.cluster.profile import LoopbackWire, Profile, ShapeChoice, read_profile


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """What is measured."""
    choices = (
        ShapeChoice("product", "rows=1 outputs=8", "kernel", {"linear": 2e-3, "torch.mv": 3e-3, "kernel": 1.5e-3}),
        ShapeChoice("product", "rows=2 outputs=8", "linear", {"linear": 2.5e-3, "kernel": 4e-3}),
        ShapeChoice("attention of a token", "rows=1 keys=512", "kernel", {"torch": 1e-4, "kernel": 2e-4}),
    )
    profiles = [profile.profile_of(node("here", ""), LoopbackWire(2e-5, 1e-6, 1.5e9), choices)]
    monkeypatch.setattr(
        profile, "measured", lambda seconds, threads, device: (profiles[0], "3 choices are kept in a file")
    )
    return profiles


def test_what_is_shown(made: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "box: 8 cores, 8 threads used" in shown
    assert "read at 20.0 GB/s, copied at 30.0 GB/s" in shown
    assert "20 µs one way, 1500 MB/s" in shown
    assert "too low" not in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["float32", "1024", "100.0"] in lines
    assert ["rows=1", "outputs=8", "kernel", "2.00", "3.00", "1.50"] in lines
    assert ["rows=2", "outputs=8", "linear", "2.50", "4.00"] in lines, "of one row alone is torch.mv"
    assert ["rows=1", "keys=512", "kernel", "0.10", "0.20"] in lines, "taken, though torch is faster"
    assert "3 choices are kept in a file" in shown


def test_the_device_that_was_measured_is_named(
    made: list[Profile], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memory is the profile's, from which plans are made."""
    monkeypatch.setattr("tllm.devices.memory.device_name", lambda device: "cuda:0 Some GPU")
    monkeypatch.setattr("tllm.devices.memory.total_memory", lambda device: 80 * 2**30)
    monkeypatch.setattr("tllm.devices.memory.available_memory", lambda device: 79 * 2**30)
    made[0] = profile.of_device(made[0], torch.device("cuda", 0))
    assert main(["profile", "--quiet", "--device", "cuda:0"]) == 0
    shown = capsys.readouterr().out
    assert "measured on cuda:0 Some GPU" in shown and "memory: 80.00 GiB, 79.00 GiB free" in shown


def test_what_is_measured_computes_on_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of kernels goes by the thread's device, which is the first one until it is told."""
    told, second = list[object](), torch.device("cuda", 1)

    async def no_wire(seconds: float) -> None: ...

    def examine(*asked: object) -> NodeProbe:
        told.append(asked[-1])
        return node("here", "")

    monkeypatch.setattr(profile, "_wire", no_wire)
    monkeypatch.setattr(profile, "of_device", lambda found, device: found)
    monkeypatch.setattr("tllm.devices.choose.choose_device", lambda asked: second)
    monkeypatch.setattr("tllm.devices.choose.compute_on", lambda device: told.append(("thread", device)))
    monkeypatch.setattr("tllm.node.roles.doctor_rank.examine", examine)
    profile.measured(1.0, None, "cuda:1")
    assert told == [("thread", second), second]


def test_measured_again(made: list[Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    assert main(["profile", "--quiet"]) == 0 and os.environ[VARIABLE] == "on"
    assert main(["profile", "--quiet", "--measure-again"]) == 0 and os.environ[VARIABLE] == "again"


def test_a_busy_machine_is_said(made: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    made[0] = profile.profile_of(node("here", "", load=6.0, cores=8), None)
    assert main(["profile"]) == 0
    shown = capsys.readouterr()
    assert "other programs keep 6.0 of 8 processors busy: these speeds are too low" in shown.out
    made[0] = profile.profile_of(node("here", "", load=15.4, cores=2), None)
    assert main(["profile", "--quiet"]) == 0
    assert "other programs want 15.4 processors, and it has 2: these" in capsys.readouterr().out
    assert "up to 60 s" in shown.err


def test_the_file(made: list[Profile], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", str(tmp_path / "p.json"), "--json", "--quiet"]) == 0
    assert read_profile(tmp_path / "p.json") == made[0]
    assert capsys.readouterr().out == (tmp_path / "p.json").read_text()
    assert made[0].date == "2026-09-21T14:13:20+00:00"


def test_a_file_that_cannot_be_written(made: list[Profile], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", "/proc/p.json", "--quiet"]) == 2
    assert "cannot write" in capsys.readouterr().err
