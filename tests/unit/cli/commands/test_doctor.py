from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.node.visits import node, visit
from tllm.cli.commands import doctor
from tllm.cli.main import main
from tllm.node.machine.machine_facts import ClusterProbe


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[ClusterProbe]:
    """What the next visit finds."""
    visits = [visit("abc")]

    async def arrange(args: Any) -> ClusterProbe:
        doctor.print_join_line(2, "10.0.0.1:7000", "tllm1-abc")
        return visits[0]

    monkeypatch.setattr(doctor, "_probe_cluster", arrange)
    monkeypatch.setattr(doctor, "probe_this_machine", lambda seconds, threads: visits[0])
    return visits


def test_nothing_wrong_is_code_0(found: list[ClusterProbe], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "3"]) == 0
    shown = capsys.readouterr()
    assert "\n  tllm doctor 10.0.0.1:7000 --token tllm1-abc\n" in shown.err
    lines = shown.out.splitlines()
    assert lines[-1] == "nothing is wrong"
    assert "a, b, c: 1 socket, 1 NUMA node, 8 cores" in lines, "three of one host name see the same machine"
    assert sum("0.300 ms" in line and "936 Mbit/s" in line and "+0.2 ms" in line for line in lines) == 6


def test_advice_alone_is_code_0(found: list[ClusterProbe], capsys: pytest.CaptureFixture[str]) -> None:
    found[0] = ClusterProbe((node("this machine", "", firewalls=("ufw",)),))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "advice:\n  this machine: the firewall ufw is on." in shown
    assert shown.endswith("nothing is wrong\n")
    assert "GFLOP/s" in shown


def test_what_is_wrong_is_code_1(found: list[ClusterProbe], capsys: pytest.CaptureFixture[str]) -> None:
    found[0] = visit("ab", {"ab": "no answer within 10 s"})
    assert main(["doctor", "--local", "2"]) == 1
    shown = capsys.readouterr().out
    assert "no way" in shown
    assert "wrong:\n  a to b: no answer within 10 s. See the firewalls" in shown
    assert "nothing is wrong" not in shown


def test_json_holds_everything(found: list[ClusterProbe], capsys: pytest.CaptureFixture[str]) -> None:
    found[0] = replace(visit("ab"), nodes=(node("a", "10.0.0.1", open_files=9), node("b", "10.0.0.2")))
    assert main(["doctor", "--nodes", "2", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert [one["node"] for one in said["nodes"]] == ["a", "b"]
    topology = said["nodes"][0]["topology"]
    assert (len(topology["cores"]), topology["nodes"][0]["memory_bytes"]) == (8, 2**34)
    assert said["ways"][0]["measured"]["mtu"] == 1500
    (finding,) = said["findings"]
    assert (finding["about"], finding["wrong"]) == ("a", True)
    assert finding["advice"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nodes", "2", "--local", "2"], "not allowed with argument"),
        (["10.0.0.1:7000", "--nodes", "2", "--token", "x"], "--nodes and --local begin one here"),
        (["10.0.0.1:7000"], "there is no join token"),
        (["nowhere"], "is not HOST:PORT"),
    ],
)
def test_what_cannot_be(
    words: list[str],
    error: str,
    found: list[ClusterProbe],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TLLM_JOIN_TOKEN", raising=False)
    assert main(["doctor", *words]) == 2
    assert error in capsys.readouterr().err


def test_another_doctors_visit_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("tllm.node.worker.work", seen.append)
    assert main(["doctor", "10.0.0.1:7000", "--token", "tllm1-abc"]) == 0
    assert (seen[0].host, seen[0].port, seen[0].token) == ("10.0.0.1", 7000, "tllm1-abc")
