"""`serve` on one host, `join` on two others, the official client on a fourth: over shaped, far and lossy links."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.commands import Running, run_module, running, tllm
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.comm.namespaces import inside
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import SamplingParams

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

KEY = "a-key-of-this-test"
COUNT = 3
IMPATIENT = "from tllm.node.front_end import remote_engine\nremote_engine.RESUME_SECONDS = 4.0"
"""For a first machine that has to look in vain for who coordinates: as it does for half a minute."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


def expected(folder: Path) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with Engine.load(folder, "pp=1", EngineConfig(dtype="float32", cache_tokens=512)) as engine:
        return [engine.generate([[1, 2, 3 + number]], greedy)[0] for number in range(COUNT)]


def serve(hosts: Hosts, folder: Path, *more: str, before: str = "") -> Any:
    words = ["serve", str(folder), "--nodes", "3", "--host", hosts.addresses[0], "--api-key", KEY, "--threads", "1"]
    return running(*words, "--cluster-host", hosts.addresses[0], *more, host=hosts.command(0), before=before)


def join(hosts: Hosts, number: int, line: Any) -> Any:
    return running("join", line[1], "--token", line[2], "--name", f"host-{number}", host=hosts.command(number))


def ask(hosts: Hosts, url: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return run_module("tests.support.serving.openai_client", url, key, str(COUNT), host=hosts.command(3))


def url_of(server: Running) -> str:
    return str(server.until(r"serving .* at (\S+)")[1])


@pytest.mark.parametrize(
    ("network", "plan"),
    [
        pytest.param(dict(rate="100mbit"), "pp=2,tp=1+2", marks=pytest.mark.soak, id="100mbit"),  # as where a cable is
        pytest.param(dict(delay_ms=5, loss=0.005), "pp=3", id="5ms-lossy"),
    ],
)
def test_three_hosts_serve_the_official_client(network: dict[str, Any], plan: str, folder: Path) -> None:
    with Hosts(4, **network) as hosts, serve(hosts, folder, "--plan", plan) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        with join(hosts, 1, line), join(hosts, 2, line):
            url = url_of(server)
            done = ask(hosts, url)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == expected(folder)
            refused = ask(hosts, url, "not the key")
            assert "AuthenticationError" in refused.stderr
            assert server.interrupt()[0] == 0


@pytest.mark.slow
def test_a_cable_pulled_out_is_outlived_and_its_node_taken_back(folder: Path) -> None:
    """The node is not killed, only silent; plugged in again it finds the coordinator and is of use to it. So is the
    first machine: meanwhile it answers that it coordinates no more, and then it is a node of whoever does."""
    with Hosts(4, rate="100mbit") as hosts, serve(hosts, folder, "--plan", "pp=3", before=IMPATIENT) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        with join(hosts, 1, line), join(hosts, 2, line):
            url = url_of(server)
            assert ask(hosts, url).returncode == 0
            hosts.link(2, up=False)
            start = time.monotonic()
            done = ask(hosts, url)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == expected(folder)
            assert time.monotonic() - start < 30
            status = cluster(hosts, url)
            assert (status["epoch"], status["losses"], status["plan"][:4]) == (2, 1, "pp=2")
            server.until(r"tllm join (\S+) --token (\S+)")  # somebody may take its place, or itself:
            hosts.link(2, up=True)
            while (status := cluster(hosts, url))["plan"] != "pp=3,tp=1+1+1,layers=1+1+2" or not status["ready"]:
                time.sleep(0.2)
            assert json.loads(ask(hosts, url).stdout) == expected(folder)
            while len(cluster(hosts, url)["replicas"]["nodes"]) < 3:
                time.sleep(0.2)
            hosts.link(0, up=False)
            told = until_deposed(hosts, url, folder.name)
            assert told["code"] == "node_lost" and "it could not reach most of 3 replicas" in told["message"]
            hosts.link(0, up=True)
            start = time.monotonic()
            assert url_of(server) == url, "the first machine serves as one of the nodes"
            while not (status := cluster(hosts, url))["ready"] or seated(status) != ["host-1", "host-2", "the first"]:
                time.sleep(0.2)
            print(f"the first machine has a rank again {time.monotonic() - start:.1f} s after its cable was plugged in")
            assert json.loads(ask(hosts, url).stdout) == expected(folder)
            code, said = server.interrupt()
            assert code == 0 and "Traceback" not in said, said


def until_deposed(hosts: Hosts, url: str, model: str) -> dict[str, Any]:
    """What the first host answers to a request, asked there, once it coordinates no more and has looked in vain for who
    does."""
    asked = {"model": model, "prompt": [1], "max_tokens": 1}
    with inside(hosts.names[0]):
        while True:
            told = httpx.post(f"{url}/completions", json=asked, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
            if told.status_code == 503:
                return dict(told.json()["error"])
            time.sleep(0.2)


def seated(status: dict[str, Any]) -> list[str]:
    """The nodes that have ranks, by their names; the first machine's is made from that of this machine."""
    names = [node["node"] for node in status["nodes"] if node["rank"] is not None]
    return sorted(name if name.startswith("host-") else "the first" for name in names)


def cluster(hosts: Hosts, url: str) -> dict[str, Any]:
    """What `tllm status` shows."""
    port = url.split(":")[2].split("/")[0]
    words = ["status", "--json", "--host", hosts.addresses[0], "--port", port, "--api-key", KEY]
    found: dict[str, Any] = json.loads(tllm(*words, host=hosts.command(3)).stdout)
    return found
