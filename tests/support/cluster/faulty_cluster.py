"""`tllm serve` on one host and `tllm join` on others, watched from all sides while faults come to them."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.cluster.history import History
from tests.support.cluster.hosts import Hosts
from tests.support.comm.namespaces import inside

KEY = "a-key-of-the-fault-suite"
PORT = 8000
START_SECONDS, SETTLE_SECONDS = 90.0, 60.0
LOOK_SECONDS = 0.02
PAGES = "vllm:kv_cache_usage_perc"
KEPT = {"threads of server": 8, "threads of rank": 2}
"""What may be started in time and is kept: threads for work beside a server's loop, and of each link for frames that
do not leave at once. More is a leak."""


class Faulty:
    """A cluster of `count` hosts, one stage on each. What is seen goes to `history`, which each run sets anew.

    Used in a `with`, within which the calling thread is on host 0.
    """

    def __init__(self, hosts: Hosts, folder: Path, logs: Path, count: int = 3) -> None:
        self.hosts, self.history = hosts, History()
        self.model = folder.name
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder, self._logs, self._count = folder, logs, count
        self._tokens: list[tuple[str, str]] = []
        self._stack, self._over = ExitStack(), threading.Event()
        self._starts = 0

    def __enter__(self) -> Faulty:
        self._stack.enter_context(inside(self.hosts.names[0]))
        here = self.hosts.addresses[0]
        words = ["serve", str(self._folder), "--nodes", str(self._count), "--plan", f"pp={self._count}"]
        words += ["--host", here, "--port", str(PORT), "--cluster-host", here, "--api-key", KEY, "--threads", "1"]
        self.server = self._start(0, "server", *words)
        threading.Thread(target=self._follow, name="operator", daemon=True).start()
        for host in range(1, self._count):
            self.join(host)
        threading.Thread(target=self._watch, name="health", daemon=True).start()
        self.until(self.is_whole, START_SECONDS, "the cluster to be whole")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        processes = [self.server, *self.nodes.values()]
        self.server.send_signal(signal.SIGINT)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60 if kind is None else 2)
            process.kill()
            process.wait()
        self._stack.close()
        assert kind is not None or self.server.returncode == 0, self.log("server")[-2000:]

    def addresses(self) -> list[str]:
        """Every port of the cluster that is open to others: the coordinator's, and each node's."""
        return [self._tokens[0][0], *(str(one["address"]) for one in self.status()["nodes"])]

    def join(self, host: int) -> None:
        """Start the node of a host by the latest token that is not used."""
        self.until(lambda: bool(self._tokens), START_SECONDS, "a join line")
        address, token = self._tokens[0] if len(self.nodes) < self._count - 1 else self._tokens.pop()
        name = f"host-{host}"
        words = ["join", address, "--token", token, "--name", name, "--threads", "1"]
        self.nodes[name] = self._start(host, name, *words)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a page."""
        connection = http.client.HTTPConnection(self.hosts.addresses[0], PORT, timeout=60)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {KEY}"})
            reply = connection.getresponse()
            raw = reply.read()
            return reply.status, raw.decode() if path == "/metrics" else json.loads(raw)
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/v1/cluster")[1]
        return found

    def pid(self, node: str) -> int:
        return next(int(one["pid"]) for one in self.status()["nodes"] if one["node"] == node)

    def is_whole(self) -> bool:
        """Whether it serves by the whole plan."""
        try:
            status = self.status()
        except (OSError, http.client.HTTPException):
            return False
        ranks = [one["node"] for one in status["nodes"] if one["rank"] is not None]
        return bool(status["ready"] and len(ranks) == self._count and status["plan"].startswith(f"pp={self._count}"))

    def counts(self) -> dict[str, int]:
        """What a run may leave behind, by what and whose it is."""
        self.until(lambda: PAGES in self.metrics(), SETTLE_SECONDS, "the engine's numbers")
        found = self.metrics()
        counts = {
            "pages in use": int(1000 * found[PAGES]),
            "sequences": int(found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]),
        }
        pids = {"server": self.server.pid, **{f"rank {one['rank']}": one["pid"] for one in self.status()["nodes"]}}
        time.sleep(5 * LOOK_SECONDS)  # so that the server has closed what it was asked on
        for name, pid in pids.items():
            counts[f"files of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
            counts[f"threads of {name}"] = len(os.listdir(f"/proc/{pid}/task"))
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        return {**counts, "processes of server": len(children)}

    def settled_counts(self) -> dict[str, int]:
        """The same once the replicas of the coordinator's state are complete, which are sockets and come by and by."""

        def has_replicas() -> bool:
            replicas = self.status()["replicas"]
            return replicas is None or len(replicas["nodes"]) == replicas["wanted"]

        self.until(has_replicas, SETTLE_SECONDS, "the replicas of the coordinator's state")
        return self.counts()

    def metrics(self) -> dict[str, float]:
        """The first of every name."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def leaks(self, before: Mapping[str, int]) -> list[str]:
        """What is there now and was not before, once nothing changes any more."""

        def more() -> list[str]:
            now = self.counts()
            return [
                f"{now.get(what, 0)} {what}, before {count}"
                for what, count in before.items()
                if now.get(what, 0) > count + next((more for kind, more in KEPT.items() if what.startswith(kind)), 0)
            ]

        until = time.monotonic() + 30
        while (found := more()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds:g} s for {what}; the server's log:\n{self.log('server')[-3000:]}")
            time.sleep(LOOK_SECONDS)

    def log(self, name: str) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted(self._logs.glob(f"{name}.*.log")))

    def ask(self, stream: int, question: int, body: Mapping[str, Any], seconds: float) -> threading.Thread:
        """Ask in a thread of its own; what comes goes to the history."""
        thread = threading.Thread(
            target=self._stream, args=(self.history, stream, question, body, seconds), daemon=True
        )
        thread.start()
        return thread

    def _stream(self, history: History, stream: int, question: int, body: Mapping[str, Any], seconds: float) -> None:
        connection = http.client.HTTPConnection(self.hosts.addresses[0], PORT, timeout=seconds)
        history.add("asked", stream=stream, question=question)
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                self._error(history, stream, json.loads(reply.read()))
                return
            for line in reply:
                if line.startswith(b"data: {"):
                    self._chunk(history, stream, json.loads(line[6:]))
                elif line.startswith(b"data: [DONE]") and not history.of("error", stream=stream):
                    history.add("ended", stream=stream)
        except (OSError, http.client.HTTPException) as error:
            history.add("broken", stream=stream, why=f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    def _chunk(self, history: History, stream: int, event: dict[str, Any]) -> None:
        if "error" in event:
            self._error(history, stream, event)
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                history.add("tokens", stream=stream, ids=choice["token_ids"])

    def _error(self, history: History, stream: int, event: dict[str, Any]) -> None:
        history.add("error", stream=stream, code=event["error"]["code"], message=event["error"]["message"])

    def _start(self, host: int, name: str, *words: str) -> subprocess.Popen[bytes]:
        self._starts += 1
        log = self._logs / f"{name}.{self._starts:03}.log"
        return self.hosts.start(host, sys.executable, "-m", "tllm.cli", *words, log=log)

    def _follow(self) -> None:
        """The operator's eyes: every line of the server's log as it comes."""
        with next(self._logs.glob("server.*.log")).open() as log:
            part = ""
            while not self._over.is_set():
                part += log.read()
                *lines, part = part.split("\n")
                for line in lines:
                    if found := re.search(r"tllm join (\S+) --token (\S+)", line):
                        self._tokens.append((found[1], found[2]))
                    elif found := re.search(r"lost (\S+): (.*)", line):
                        self.history.add("lost", node=found[1], why=found[2])
                time.sleep(LOOK_SECONDS)

    def _watch(self) -> None:
        """What `/health/progress` and `/health/ready` say, whenever it changes."""
        last: dict[str, tuple[int, str]] = {}
        while not self._over.wait(LOOK_SECONDS):
            for path in ("/health/progress", "/health/ready"):
                try:
                    status, found = self.get(path)
                except (OSError, http.client.HTTPException):
                    continue
                said = (status, re.sub(r"[\d.]+", "#", found["error"]["message"]) if status != 200 else "")
                if last.get(path) != said:
                    last[path] = said
                    message = found["error"]["message"] if status != 200 else ""
                    self.history.add(path, status=status, message=message)


@dataclass(frozen=True)
class Fault:
    """What may happen to a node: `begin` and `end` do it and undo it. `is_slow`: it is no reason to lose the node."""

    name: str
    begin: Callable[[Faulty, str, random.Random], None]
    end: Callable[[Faulty, str], None]
    of_local: bool = False  # may come to the first host's worker too
    is_slow: bool = False
    by_relay: bool = False

    def victims(self, count: int) -> Sequence[str]:
        nodes = [f"host-{host}" for host in range(1, count)]
        return ["local-0", *nodes] if self.of_local else nodes


def host_of(node: str) -> int:
    return int(node.rpartition("-")[2])


def _kill(cluster: Faulty, node: str, dice: random.Random) -> None:
    os.kill(cluster.pid(node), signal.SIGKILL)


def _start_again(cluster: Faulty, node: str) -> None:
    if node in cluster.nodes:
        cluster.nodes[node].wait()
        cluster.join(host_of(node))


def _stop(cluster: Faulty, node: str, dice: random.Random) -> None:
    os.kill(cluster.pid(node), signal.SIGSTOP)


def _continue(cluster: Faulty, node: str) -> None:
    if node in cluster.nodes:  # else the coordinator has killed it, and started another
        os.kill(cluster.nodes[node].pid, signal.SIGCONT)


def _half_open(cluster: Faulty, node: str, dice: random.Random) -> None:
    sent = dice.random() < 0.5
    cluster.hosts.lose(host_of(node), sent, not sent)


FAULTS = (
    Fault("SIGKILL", _kill, _start_again, of_local=True),
    Fault("SIGSTOP", _stop, _continue, of_local=True),
    Fault(
        "link down",
        lambda cluster, node, dice: cluster.hosts.link(host_of(node), up=False),
        lambda cluster, node: cluster.hosts.link(host_of(node), up=True),
    ),
    Fault("half-open", _half_open, lambda cluster, node: cluster.hosts.find()),
    Fault(
        "100 % loss",
        lambda cluster, node, dice: cluster.hosts.lose(host_of(node), True, True),
        lambda cluster, node: cluster.hosts.find(),
    ),
    Fault(
        "10 Mbit/s",
        lambda cluster, node, dice: cluster.hosts.narrow(host_of(node), "10mbit"),
        lambda cluster, node: cluster.hosts.narrow(host_of(node), ""),
        is_slow=True,
    ),
    Fault(
        "200 ms",
        lambda cluster, node, dice: cluster.hosts.delay(200),
        lambda cluster, node: cluster.hosts.delay(0.01),
        is_slow=True,
        by_relay=True,
    ),
)
