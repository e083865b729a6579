"""Some runs of the fault suite (`benchmarks/faults/fault_suite.py` has all), and what its checker does not let pass."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.cluster.faulty_cluster import FAULTS, Faulty
from tests.support.cluster.history import History, faults_in
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.serving.serving_faults import Run, golden
from tests.support.training.training_faults import TrainRun, undisturbed

BY_NAME = {fault.name: fault for fault in FAULTS}
RUNS = (("half-open", "prefill"), ("10 Mbit/s", "decode"))
"""Those that need hosts; `test_serving_recovery` kills and stops processes."""
MORE_RUNS = (("SIGKILL", "decode"), ("SIGSTOP", "idle"))
FULL = (list(range(8)), [5, 6, 7])


@pytest.fixture
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


def check_that_strangers_are_counted(cluster: Faulty) -> None:
    """Whoever speaks no TLS is shown out of every port, and stands in `/metrics`."""
    addresses = cluster.addresses()
    assert len(addresses) == 4
    for address in addresses:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert b"HTTP" not in sock.recv(1000)
    cluster.until(lambda: cluster.metrics()["tllm_refused_links_total"] == len(addresses), 60, "the counter")


@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE_RUNS, marks=pytest.mark.soak)], ids=["hosts", "processes"])
def test_streams_under_faults(runs: Sequence[tuple[str, str]], folder: Path, tmp_path: Path) -> None:
    """Each ends with the tokens of the undisturbed run; who is at fault is named before it is lost; nothing is left."""
    truth = golden(folder)
    with Hosts(3) as hosts, Faulty(hosts, folder, tmp_path) as cluster:
        check_that_strangers_are_counted(cluster)
        for name, moment in runs:
            outcome = Run(cluster, truth, BY_NAME[name], moment, seed=1)()
            assert not outcome.wrong, (name, moment, outcome.wrong)
            told = outcome.history.of("/health/progress", status=503)
            if BY_NAME[name].is_slow:
                assert not told and outcome.lost is None
            elif name != "SIGKILL":  # which may be made good before anybody asks
                assert any(outcome.node in event["message"] for event in told)
                assert outcome.named is not None and outcome.lost is not None and outcome.named < outcome.lost
                late = rf"WARNING tllm.node: node {outcome.node} \(rank \d, layers .*\) has been silent for \d"
                assert re.search(late, cluster.log("server"))


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("namespaces")
def test_training_under_a_fault(tmp_path: Path) -> None:
    truth = undisturbed(tmp_path / "truth")
    with Hosts(3) as hosts:
        outcome = TrainRun(hosts, tmp_path, truth, BY_NAME["SIGKILL"], "checkpoint", seed=0)()
    assert not outcome.wrong, outcome.wrong
    assert outcome.lost is not None


def history(*streams: tuple[list[int], str], code: str = "node_lost", message: str = "node a is gone") -> History:
    """Streams of one token at a time, and how each ends, after a fault."""
    made = History()
    made.add("fault")
    for number, (ids, end) in enumerate(streams):
        made.add("asked", stream=number, question=number)
        for token in ids:
            made.add("tokens", stream=number, ids=[token])
        if end == "error":
            made.add("error", stream=number, code=code, message=message)
        elif end:
            made.add(end, stream=number)
    return made


def late(made: History) -> History:
    made.add("tokens", stream=0, ids=[9])
    return made


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (lambda: history((FULL[0], "ended"), (FULL[1], "ended")), ""),
        (lambda: history((FULL[0], "ended"), ([5], "error")), ""),
        (lambda: history(([], "error")), ""),
        (lambda: history((FULL[0][:-1], "ended")), "its tokens are"),
        (lambda: history(([0, 2, 1, 3, 4, 5, 6, 7], "ended")), "its tokens are"),
        (lambda: history(([*FULL[0], 7], "ended")), "its tokens are"),
        (lambda: history((FULL[0], "")), "0 ends"),
        (lambda: late(history((FULL[0], "ended"))), "tokens after the first"),
        (lambda: history(([1], "error")), "before its error"),
        (lambda: history(([0], "error"), message="something is gone"), "names none of a"),
        (lambda: history(([0], "error"), code="engine_error"), "ended with engine_error"),
    ],
)
def test_the_checker(made: Callable[[], History], wrong: str) -> None:
    found = faults_in(made(), FULL, 1.0, ["a"])
    assert (wrong in found[0]) if wrong else not found


def test_the_checker_minds_the_time() -> None:
    assert "took" in faults_in(history((FULL[0], "ended")), FULL, -1.0, ["a"])[0]
