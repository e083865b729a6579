from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from tllm.cli.commands import join
from tllm.cli.main import main
from tllm.cluster.join_token import FINGERPRINT_SIZE, SECRET_SIZE, JoinToken
from tllm.node import worker

TOKEN, OTHER = (str(JoinToken(secret * SECRET_SIZE, b"f" * FINGERPRINT_SIZE)) for secret in (b"a", b"b"))
TAKEN: list[worker.WorkerSettings] = []


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that only remembers what it was told."""
    TAKEN.clear()
    monkeypatch.setattr(worker, "work", lambda settings, http, make_replica: not TAKEN.append(settings))
    monkeypatch.delenv("TLLM_API_KEY", raising=False)
    monkeypatch.delenv("TLLM_JOIN_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_whole_line(tmp_path: Path) -> None:
    words = ["join", "[fe80::1]:7000", "--token", TOKEN, "--name", "lab-3", "--listen", "10.0.0.3", "--threads", "4"]
    assert main(words) == 0
    known = dict(host="fe80::1", port=7000, token=TOKEN, node="lab-3", listen="10.0.0.3", threads=4)
    kept = dict(weights_cache=str(tmp_path / "tllm" / "weights"), weights_cache_bytes=32 << 30)
    kept |= dict(cache_dir=str(tmp_path / "tllm" / "pages"), cache_dir_size=32 << 30)
    assert [worker.WorkerSettings(**known, **kept, rejoin=300)] == TAKEN  # type: ignore[arg-type]
    assert main([*words, "--rejoin", "5"]) == 0
    assert TAKEN[1].rejoin == 5


def test_work_that_goes_on_another_time_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts commands again, as Kubernetes does, then starts this one again."""
    monkeypatch.setattr(worker, "work", lambda settings, http, make_replica: False)
    assert main(["join", "lab-1:7000", "--token", TOKEN]) == 130


def test_what_a_node_gives_and_keeps() -> None:
    words = ["join", "lab-1:7000", "--token", TOKEN, "--memory", "12GiB", "--weights-cache", "kept"]
    assert main([*words, "--weights-cache-size", "5GB"]) == 0
    assert main([*words, "--weights-cache-size", "0"]) == 0
    assert [(one.memory, one.weights_cache, one.weights_cache_bytes) for one in TAKEN] == [
        (12 << 30, "kept", 5 * 10**9),
        (12 << 30, "kept", 0),
    ]


def test_a_token_that_no_process_list_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TOKEN}\n"))
    assert main(["join", "lab-1:7000", "--token", "-"]) == 0
    monkeypatch.setenv("TLLM_JOIN_TOKEN", OTHER)
    assert main(["join", "lab-1:7000"]) == 0
    assert [settings.token for settings in TAKEN] == [TOKEN, OTHER]


def test_a_token_that_was_mistyped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "lab-1:7000", "--token", TOKEN[:-1]]) == 5
    assert "not a join token" in capsys.readouterr().err
    assert not TAKEN


def test_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "lab-1:7000"]) == 2
    assert "no join token" in capsys.readouterr().err
    assert not TAKEN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines and no API key is set"),
        (["--serve", "--api-key", "short"], "at least 8"),
        (["--port", "8001"], "options of an HTTP server are given, and this node is to have none"),
        (["--allow-origin", "https://box"], "add --serve"),
        (["--serve", "--host", "no.such.name.invalid", "--api-key", "long-enough"], "is no address to serve on"),
        (["--serve", "--host", "a..b", "--api-key", "long-enough"], "a..b:8000 is no address to serve on: "),
    ],
)
def test_http_that_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "lab-1:7000", "--token", TOKEN, *words]) == 2
    assert said in capsys.readouterr().err
    assert not TAKEN


def test_a_key_in_the_environment_is_no_wish_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_API_KEY", "long-enough")
    assert main(["join", "lab-1:7000", "--token", TOKEN]) == 0
    assert len(TAKEN) == 1


@pytest.mark.parametrize(("host", "listen"), [("0.0.0.0", ""), ("::", ""), ("10.0.0.3", "10.0.0.3")])
def test_a_first_machine_that_comes_back_as_a_node_is_reached_at_an_address(
    host: str, listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the wildcard at which it had listened, which is each other machine's own."""
    told = list[dict[str, Any]]()
    monkeypatch.setattr(
        "tllm.node.replication.rejoin.rejoin", lambda cluster, door, departure, every, own: not told.append(own)
    )
    args = argparse.Namespace(cluster_host=host, threads=None, memory=None, quiet=True)
    assert join._be_node(args, None, (host, 7000), (None, None), {}) == 0  # type: ignore[arg-type]
    assert told[0]["listen"] == listen
