"""Every machine is told to end and started again by its own command, one after another, while clients stream.

A client is an ordinary one: it asks the next machine where one is told to go elsewhere (503, or nobody listens), and
whatever has begun must end where it began. A reply that may be taken up is, by its id, at another machine.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.multi.faults.test_first_machine_dies import ids_of, name_of, replicas
from tests.support.cluster.commands import EXACT, Running, running
from tllm.recipes.bench.processes import free_row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # starts six processes that load torch, three at a time

TINY = Path(__file__).parents[3] / "models" / "tiny"
KINDS = (
    {"prompt": "x = ", "max_tokens": 120, "ignore_eos": True, "return_token_ids": True, "temperature": 0},
    {"prompt": "def f(", "max_tokens": 90, "ignore_eos": True, "return_token_ids": True, "temperature": 0.8, "seed": 7},
)
CLIENTS = 2
WAIT = 90.0


class Clients:
    """Streams that are kept going, each from the next machine. `faults` says what went wrong with any."""

    def __init__(self, urls: list[str], truth: list[list[int]]) -> None:
        self._urls, self._truth = urls, truth
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            kind = turn % len(KINDS)
            try:
                ids = self._completed(turn, KINDS[kind])
            except (httpx.HTTPError, AssertionError) as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                continue
            self.counts["completed"] += 1
            if ids != self._truth[kind]:
                self.faults.append(f"kind {kind}: {difference(ids, self._truth[kind])}")

    def _completed(self, turn: int, asked: dict[str, Any]) -> list[int]:
        """A reply's tokens, from the first machine that takes the request."""
        until = time.monotonic() + 60
        for url in itertools.islice(itertools.cycle(self._urls), turn % len(self._urls), None):
            assert time.monotonic() < until, "no machine takes a request"
            try:
                with httpx.stream("POST", f"{url}/v1/completions", json=asked | {"stream": True}, timeout=60) as reply:
                    if reply.status_code == 503 and b"draining" in reply.read():
                        self.counts["told to go elsewhere"] += 1
                        continue
                    assert reply.status_code == 200, (reply.status_code, reply.read())
                    lines = list(reply.iter_lines())
                    assert lines[-2:] == ["data: [DONE]", ""], lines[-5:]
                    return [id for line in lines for id in ids_of(line)]
            except httpx.ConnectError:
                self.counts["nobody listens"] += 1
                time.sleep(0.05)
        raise AssertionError("there are always more machines")


def difference(ids: list[int], truth: list[int]) -> str:
    """Where two replies part, in few words: a long list would be cut where it is shown."""
    place = next((at for at, pair in enumerate(zip(ids, truth, strict=False)) if pair[0] != pair[1]), len(ids))
    return (
        f"{len(ids)} tokens of {len(truth)}, which part at {place}: "
        f"{ids[place : place + 8]} and not {truth[place : place + 8]}"
    )


def holds(what: Callable[[], bool]) -> None:
    """Wait until something does, while a server may not listen."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        try:
            if what():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"it does not hold after {WAIT:g} s")


def is_ready(url: str) -> bool:
    """What an operator, or Kubernetes, waits for before the next machine is restarted."""
    return httpx.get(f"{url}/health/ready", timeout=60).status_code == 200


def left(node: Running) -> str:
    """Tell a machine to end; what it said. It must end in order."""
    node.process.terminate()
    code, said = node.wait()
    assert code == 0, (code, said)
    assert "Traceback" not in said, said
    assert "took the coordinator" not in said, said
    return said


def epoch(url: str) -> int:
    found = httpx.get(f"{url}/v1/cluster", timeout=60).json()["epoch"]
    assert isinstance(found, int)
    return found


def test_all_machines_are_restarted_and_no_request_fails(tmp_path: Path) -> None:
    first_port = free_row(4)
    cluster, *http = range(first_port, first_port + 4)
    urls = [f"http://127.0.0.1:{port}" for port in http]
    first_words = [
        "serve",
        str(TINY),
        "--nodes",
        "3",
        "--plan",
        "pp=3",
        *EXACT,
        "--threads",
        "1",
        "--cluster-host",
        "127.0.0.1",
    ]
    first_words += [
        "--cluster-port",
        str(cluster),
        "--cluster-folder",
        str(tmp_path / "cluster"),
        "--port",
        str(http[0]),
    ]
    env = {"TLLM_SECRET": "0123456789abcdef" * 4}

    def node_words(number: int) -> list[str]:
        name = ("north", "south")[number - 1]
        words = ["join", f"127.0.0.1:{cluster}", "--name", name, "--threads", "1", "--listen", "127.0.0.1", "--serve"]
        return [*words, "--port", str(http[number])]

    commands = [first_words, node_words(1), node_words(2)]
    with ExitStack() as stack:
        machines = [stack.enter_context(running(*words, env=env)) for words in commands[:1]]
        machines[0].until(r"tllm join (\S+)")
        machines += [stack.enter_context(running(*words, env=env)) for words in commands[1:]]
        for url in urls:
            holds(lambda url=url: is_ready(url))  # type: ignore[misc]
        truth = [completed_once(urls[1], asked) for asked in KINDS]
        holds(lambda: replicas(urls[0]) == 3)
        stored = httpx.post(
            f"{urls[1]}/v1/completions", json=KINDS[0] | {"store": True, "stream": True}, timeout=60
        ).text
        name = name_of(stored.splitlines())
        with Clients(urls, truth) as clients:
            order = [0]  # the coordinator, then whoever follows it, then the other
            while order:
                number = order.pop(0)
                before = clients.counts["completed"]
                holds(lambda: clients.counts["completed"] >= before + CLIENTS)  # noqa: B023
                was = epoch(urls[(number + 1) % 3])
                said = left(machines[number])
                print(f"machine {number} left in epoch {was}; {dict(clients.counts)}")
                if number == 0:
                    heir = re.search("hands the coordinator's office over to (north|south)", said)
                    assert heir is not None, said
                    order = [1, 2] if heir[1] == "north" else [2, 1]
                elif len(order) == 1:
                    assert "hands the coordinator's office over to" in said, said
                machines[number] = stack.enter_context(running(*commands[number], env=env))
                holds(lambda: is_ready(urls[number]))  # noqa: B023
                holds(lambda: replicas(urls[number]) == 3)  # noqa: B023
                assert not clients.faults, clients.faults[:3]
            before = clients.counts["completed"]
            holds(lambda: clients.counts["completed"] >= before + 3 * CLIENTS)
        assert not clients.faults, clients.faults[:3]
        print(dict(clients.counts))
        for url in urls:
            reply = httpx.get(f"{url}/v1/completions/{name}", headers={"accept": "text/event-stream"}, timeout=60)
            assert reply.text == stored, "a reply that is kept outlives all processes"
        holds(lambda: seated(urls[0]) == 3)


def completed_once(url: str, asked: dict[str, Any]) -> list[int]:
    reply = httpx.post(f"{url}/v1/completions", json=asked | {"stream": True}, timeout=60)
    return [id for line in reply.text.splitlines() for id in ids_of(line)]


def seated(url: str) -> int:
    return sum(node["rank"] is not None for node in httpx.get(f"{url}/v1/cluster", timeout=60).json()["nodes"])
