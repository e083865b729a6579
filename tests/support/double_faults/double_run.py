"""Two faults at once in a cluster that has no special machine: what its users see, and what is wrong with that."""

from __future__ import annotations

import http.client
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.support.cluster.faulty_cluster import PORT
from tests.support.cluster.history import History, ids_of
from tests.support.comm.namespaces import inside
from tests.support.double_faults.equal_hosts import COUNT, HEADERS, EqualHosts
from tests.support.serving.serving_faults import SHORT, Question

BOUND = 60.0
"""Seconds within which every stream must have ended after the faults, and a new request after these."""


@dataclass(frozen=True)
class HostFault:
    """What may come to a host: `begin` does it and `end` undoes it. With `is_lost` its own users lose their streams; a
    host that `comes_back` must answer again once the fault is undone."""

    name: str
    begin: Callable[[EqualHosts, int, random.Random], None]
    end: Callable[[EqualHosts, int], None]
    is_lost: bool = True
    comes_back: bool = True


def _partition(cluster: EqualHosts, host: int, dice: random.Random) -> None:
    """A cut of one to nine seconds: some are over before anybody is given up, and others not."""
    cluster.hosts.link(host, up=False)
    timer = threading.Timer(dice.uniform(1, 9), cluster.hosts.link, (host, True))
    timer.daemon = True
    timer.start()


HOST_FAULTS = (
    HostFault("SIGKILL", lambda c, host, dice: c.signal(host, signal.SIGKILL), lambda c, host: None, comes_back=False),
    HostFault(
        "SIGSTOP",
        lambda c, host, dice: c.signal(host, signal.SIGSTOP),
        lambda c, host: c.signal(host, signal.SIGCONT),
    ),
    HostFault(
        "link cut", lambda c, host, dice: c.hosts.link(host, up=False), lambda c, host: c.hosts.link(host, up=True)
    ),
    HostFault("partition that heals", _partition, lambda c, host: None),
    HostFault("disk full", lambda c, host, dice: c.fill_disk(host), lambda c, host: c.free_disk(host), is_lost=False),
    HostFault(
        "clock moved",
        lambda c, host, dice: c.move_clock(host, dice.choice((-40 * 86400, -86400, -600, 600, 86400))),
        lambda c, host: c.move_clock(host, 0),
        is_lost=False,
    ),
)


@dataclass(frozen=True)
class Drawn:
    """What a seed draws: faults with the hosts that they come to, and how many tokens users have by then."""

    seed: int
    faults: tuple[tuple[HostFault, int], ...]
    tokens: int
    dice: random.Random = field(repr=False)

    @classmethod
    def of(cls, seed: int) -> Drawn:
        """Two faults, or one in a quarter of the runs; the first host is struck in two of three."""
        dice = random.Random(f"double faults {seed}")
        hosts = dice.sample(range(1, COUNT), 2)
        if dice.random() < 2 / 3:
            hosts[dice.randrange(2)] = 0
        number = 1 if dice.random() < 0.25 else 2
        struck = sorted(hosts)[:number]
        return cls(seed, tuple((dice.choice(HOST_FAULTS), host) for host in struck), dice.randint(2, 40), dice)

    @property
    def names(self) -> list[str]:
        return [f"{fault.name} of host {host}" for fault, host in self.faults]

    @property
    def strikes_first(self) -> bool:
        return any(host == 0 for _, host in self.faults)


@dataclass(frozen=True)
class DoubleOutcome:
    """One run. `silence`: the most seconds after the faults in which a stream of a host that was not struck got no
    token; `recovered`: from the faults until each of these streams had ended its longest silence, however short;
    `answered`: until each of these hosts had answered a new request; `returned`: from the faults' end until each host
    that was cut off or stopped had.
    """

    seed: int
    faults: list[str]
    first: bool
    recovered: float | None
    answered: float | None
    hangs: int
    wrong_tokens: int
    lost_replies: int
    wrong: list[str]
    returned: float | None = None
    silence: float | None = None


class DoubleRun:
    """Streams from every host, faults in the middle of them, and what comes after. `history` has all that was seen."""

    def __init__(self, cluster: EqualHosts, truth: Sequence[Sequence[int]], drawn: Drawn) -> None:
        self.cluster, self.truth, self.drawn = cluster, truth, drawn
        self.history = History()
        lost = {host for fault, host in drawn.faults if fault.is_lost}
        self.coming_back = [host for fault, host in drawn.faults if fault.is_lost and fault.comes_back]
        self.well = [host for host in range(COUNT) if host not in lost]
        self.streams: dict[int, threading.Thread] = {}

    def __call__(self) -> DoubleOutcome:
        kept = {host: self._keep(host) for host in self.well}
        for host in self.well:
            for question in range(len(SHORT)):
                self._ask(host, question)
        self._await_tokens()
        for fault, host in self.drawn.faults:
            fault.begin(self.cluster, host, self.drawn.dice)
        struck = self.history.add("struck", faults=", ".join(self.drawn.names))
        end = time.monotonic() + BOUND
        for thread in self.streams.values():
            thread.join(max(end - time.monotonic(), 0))
        hangs = [f"stream {stream} hangs" for stream, thread in self.streams.items() if thread.is_alive()]
        answered = self._all_answer(self.well)
        for fault, host in self.drawn.faults:
            fault.end(self.cluster, host)
        undone, returned = self.history.add("undone"), self._all_answer(self.coming_back)
        lost = [host for host, events in kept.items() if self._kept(host, events[0]) != events[1]]
        wrong = [f"stream {stream}: {why}" for stream in self.streams if (why := self._wrong(stream))]
        silent = [host for host in self.well if host not in answered]
        gone = [host for host in self.coming_back if host not in returned]
        silences = self._silences(struck.at)
        return DoubleOutcome(
            seed=self.drawn.seed,
            faults=self.drawn.names,
            first=self.drawn.strikes_first,
            recovered=max((end for _, end in silences), default=None),
            answered=None if silent else round(max(answered.values()) - struck.at, 2),
            hangs=len(hangs),
            wrong_tokens=sum("tokens" in one for one in wrong),
            lost_replies=len(lost),
            wrong=[
                *hangs,
                *wrong,
                *(f"host {host} answers nothing new" for host in silent),
                *(f"host {host} does not come back" for host in gone),
                *(f"the reply that host {host} kept is not the same" for host in lost),
            ],
            returned=None if gone or not returned else round(max(returned.values()) - undone.at, 2),
            silence=max((length for length, _ in silences), default=None),
        )

    def _body(self, question: Question, **more: Any) -> dict[str, Any]:
        return {**question.body, "model": self.cluster.model.name, **more}

    def _ask(self, host: int, question: int) -> None:
        stream = len(self.streams)
        thread = threading.Thread(target=self._stream, args=(stream, host, question), daemon=True)
        self.streams[stream] = thread
        thread.start()

    def _stream(self, stream: int, host: int, question: int) -> None:
        self.history.add("asked", stream=stream, question=question, host=host)
        try:
            reply = self.cluster.post(host, "/v1/completions", self._body(SHORT[question]), BOUND)
            if reply.status != 200:
                self.history.add("broken", stream=stream, why=f"{reply.status} {reply.read(300)!r}")
                return
            for line in reply:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.history.add("broken", stream=stream, why=str(event["error"])[:300])
                    for choice in event.get("choices", ()):
                        self.history.add("tokens", stream=stream, ids=choice.get("token_ids") or [])
            self.history.add("ended", stream=stream)
        except (OSError, http.client.HTTPException) as error:
            self.history.add("broken", stream=stream, why=f"{type(error).__name__}: {error}")

    def _await_tokens(self) -> None:
        def least() -> int:
            return min(len(self.history.of("tokens", stream=stream)) for stream in self.streams)

        self.cluster.until(lambda: least() >= self.drawn.tokens, BOUND, "tokens before the faults")

    def _wrong(self, stream: int) -> str:
        (asked,) = self.history.of("asked", stream=stream)
        broken = self.history.of("broken", stream=stream)
        if broken:
            return f"broke at host {asked['host']}: {broken[0]['why']}"
        given = ids_of(self.history, stream)
        if given != list(self.truth[asked["question"]]) and self.history.of("ended", stream=stream):
            return f"host {asked['host']} gave other tokens, {len(given)} of them"
        return ""

    def _silences(self, struck: float) -> list[tuple[float, float]]:
        """The longest silence of each stream that went on after the faults: its length, and its end after them."""
        found = []
        for stream in self.streams:
            times = [struck, *(event.at for event in self.history.of("tokens", struck, stream=stream))]
            if len(times) > 1:
                length, end = max((b - a, b - struck) for a, b in pairwise(times))
                found.append((round(length, 2), round(end, 2)))
        return found

    def _all_answer(self, hosts: Sequence[int]) -> dict[int, float]:
        """When each of these hosts, of those that do within BOUND, has answered a new request. One that answers nothing
        takes no time from the others."""
        end = time.monotonic() + BOUND
        with ThreadPoolExecutor(COUNT) as asking:
            found = zip(hosts, asking.map(lambda host: self._answers(host, end), hosts), strict=True)
            return {host: at for host, at in found if at is not None}

    def _answers(self, host: int, end: float) -> float | None:
        """When a host has given the right tokens to a new request."""
        while time.monotonic() < end:
            try:
                left = end - time.monotonic()
                reply = self.cluster.post(host, "/v1/completions", self._body(SHORT[0], stream=False), left)
                if reply.status == 200:
                    given = json.loads(reply.read())["choices"][0]["token_ids"]
                    assert given == list(self.truth[0]), f"host {host} gave other tokens to a new request"
                    return self.history.add("answered", host=host).at
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.2)
        return None

    def _keep(self, host: int) -> tuple[str, bytes]:
        """A reply that is to be kept, by its id, and its events."""
        reply = self.cluster.post(host, "/v1/completions", self._body(SHORT[1], store=True, max_tokens=20), BOUND)
        events = reply.read()
        assert reply.status == 200, events
        first = next(line for line in events.splitlines() if line.startswith(b"data: {"))
        return json.loads(first[6:])["id"], events

    def _kept(self, host: int, name: str) -> bytes:
        """A reply that was kept, once more."""
        with inside(self.cluster.hosts.names[host]):
            connection = http.client.HTTPConnection(self.cluster.hosts.addresses[host], PORT, timeout=30)
            try:
                connection.request("GET", f"/v1/completions/{name}", headers={**HEADERS, "accept": "text/event-stream"})
                return connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                return b""
