"""Replicas on a network and on clocks that a seed makes up, and the rules that hold after each step of each of them.

One schedule has lost, late, repeated and reordered messages, links that are cut on both sides or on one, processes that
end, new ones that take their places, and clients that write and read. The same seed gives the same schedule.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.consensus.linearizability import Operation, is_linearizable
from tllm.cluster.consensus.raft import Raft
from tllm.cluster.consensus.raft_log import RaftLog
from tllm.cluster.consensus.raft_messages import (
    Configuration,
    LogEntry,
    LogSnapshot,
    RaftMessage,
    ReplicaPlace,
)
from tllm.cluster.consensus.timing import CLOCK_DRIFT, RaftTiming

TIMING = RaftTiming(heartbeat=0.3, election=1.5, spread=1.0)
TICK = TIMING.heartbeat / 3
CLIENTS = 3


class Broken(AssertionError):
    """A rule of consensus does not hold."""


def place(number: int, port: int = 1) -> ReplicaPlace:
    """The replica of the `number`-th process."""
    return ReplicaPlace(f"node-{number}/{number:016x}", "127.0.0.1", port)


class Register:
    """A state machine with one value, which tells `applied` of each entry."""

    def __init__(self, applied: Callable[[bytes], None]) -> None:
        self.value = b""
        self._applied = applied

    def apply(self, content: bytes) -> None:
        self._applied(content)
        self.value = content

    def snapshot(self) -> bytes:
        return self.value

    def restore(self, data: bytes) -> None:
        self.value = data


class WatchedLog(RaftLog):
    """A log whose every new entry, and every snapshot, is held against those of all others."""

    def __init__(self, configuration: Configuration, rules: Rules, term: Callable[[], int]) -> None:
        self._rules, self._term, self._commit = rules, term, 0
        super().__init__(configuration)

    @property
    def commit(self) -> int:  # type: ignore[override]
        return self._commit

    @commit.setter
    def commit(self, index: int) -> None:
        if index == self._commit + 1 and index > self.offset:  # else a snapshot, or nothing yet
            self._rules.commits(index, self.entry(index), self._term())
        self._commit = index

    def append(self, entry: LogEntry) -> int:
        self._rules.appended(self.last_index + 1, self.last_term, entry)
        return super().append(entry)

    def install(self, snapshot: LogSnapshot) -> None:
        self._rules.installed(snapshot)
        super().install(snapshot)


class Rules:
    """What must hold in every schedule (thesis, figure 3.2 and section 6.4.1)."""

    def __init__(self) -> None:
        self.leaders: dict[int, str] = {}
        self.entries: dict[tuple[int, int], tuple[int, LogEntry]] = {}
        self.committed: dict[int, tuple[int, LogEntry, int]] = {}
        self.values: dict[int, bytes] = {0: b""}

    def appended(self, index: int, before: int, entry: LogEntry) -> None:
        """Log matching: an entry is told by its index and term, and so is all before it."""
        known = self.entries.setdefault((index, entry.term), (before, entry))
        if known != (before, entry):
            raise Broken(f"two logs have other entries at {index} of term {entry.term}")

    def leads(self, raft: Raft) -> None:
        """Election safety, and leader completeness."""
        term = raft.ballot.term
        if self.leaders.setdefault(term, raft.me.id) != raft.me.id:
            raise Broken(f"term {term} has two leaders")
        before = [index for index, (_, _, at) in self.committed.items() if at < term]
        last = max(before, default=0)
        log = raft.log
        if last > log.commit and (last > log.last_index or log.term(last) != self.committed[last][0]):
            raise Broken(f"the leader of term {term} lacks entry {last}, which was committed")

    def commits(self, index: int, entry: LogEntry, term: int) -> None:
        """State-machine safety: nobody applies anything else at this index. `term` is that of who commits it."""
        known = self.committed.setdefault(index, (entry.term, entry, term))
        if known[:2] != (entry.term, entry):
            raise Broken(f"entry {index} was committed twice, and differs")
        self.values.setdefault(index, entry.content or self.values[index - 1])

    def installed(self, snapshot: LogSnapshot) -> None:
        if snapshot.term != self.committed[snapshot.index][0] or snapshot.data != self.values[snapshot.index]:
            raise Broken(f"the snapshot at {snapshot.index} is not what was committed")


@dataclass
class Process:
    """A process with one replica, and its clock: `rate` seconds a second, `ahead` at the start."""

    place: ReplicaPlace
    rate: float
    ahead: float
    raft: Raft = field(init=False)
    register: Register = field(init=False)
    led: int = 0

    def clock(self, now: float) -> float:
        return self.ahead + self.rate * now


@dataclass
class Client:
    """One that does one thing after another: `waits` is its write that is under way, where and at which term and
    index."""

    count: int = 0
    waits: tuple[Process, int, int, bytes, float] | None = None


@dataclass(frozen=True)
class Weather:
    """How bad a schedule is: chances of a message to be lost, repeated or late, by so many seconds at the most."""

    lost: float
    repeated: float
    late: float
    most_late: float


class SimulatedReplicas:
    """`make` builds a replica, so that a test can hand in a wrong one. `drift` is what clocks are off by, at most."""

    def __init__(
        self,
        seed: int,
        make: Callable[..., Raft] = Raft,
        size: int = 3,
        drift: float = CLOCK_DRIFT,
        lasts: float = 25.0,
    ) -> None:
        self.dice = random.Random(seed)
        self.now, self.steps = 0.0, 0
        self.rules = Rules()
        self.history: list[Operation] = []
        self.processes: dict[str, Process] = {}
        self._make, self._size, self._drift, self._lasts = make, size, drift, lasts
        self._cut: set[tuple[str, str]] = set()
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._weather = self._new_weather()
        self._clients = [Client() for _ in range(CLIENTS)]
        first = self.start((place(0),))
        for number in range(1, size):
            self.start((), number)
        self._at(0.0, self._tick, first)

    # --- a schedule
    def run(self) -> None:
        """The whole schedule: bad weather, then all links mended, after which it must go on."""
        for client in self._clients:
            self._at(self.dice.uniform(1, 3), self._act, client)
        self._at(self.dice.uniform(4, 8), self._strike, None)
        self.until(self._lasts)
        self.mend()
        if self._has_majority():
            self.until(self._lasts + 20)
            self.check_progress()
        for client in self._clients:
            self._give_up(client)
        if not is_linearizable(self.history):
            raise Broken(f"clients saw what no order of {len(self.history)} operations explains")

    def isolate(self) -> None:
        """Cut all links."""
        self._cut = {(a, b) for a in self.processes for b in self.processes if a != b}

    def mend(self) -> None:
        """Good weather, and no link is cut."""
        self._weather, self._cut = Weather(0, 0, 0, 0.0), set()

    def until(self, end: float) -> None:
        """Go on to a time."""
        while self._events and self._events[0][0] <= end:
            self.now, _, what, argument = heapq.heappop(self._events)
            what(argument)
        self.now = end

    def check_progress(self) -> None:
        """A leader with a lease takes a write, and all living voters have it soon."""
        leased = [one for one in self.processes.values() if one.raft.is_leased(one.clock(self.now))]
        if len(leased) != 1:
            raise Broken(f"{len(leased)} of {len(self.processes)} replicas have a lease on a network that is well")
        found = leased[0].raft.propose(b"last", leased[0].clock(self.now))
        assert found is not None
        self.until(self.now + 3 * TIMING.heartbeat)
        voters = [self.processes.get(one.id) for one in leased[0].raft.log.configuration]
        if any(one.register.value != b"last" for one in voters if one is not None):
            raise Broken("a voter does not have what was written on a network that is well")

    # --- processes
    def start(self, configuration: Configuration, number: int | None = None) -> Process:
        number = len(self.processes) if number is None else number
        process = Process(place(number), 1 + self.dice.uniform(-self._drift, self._drift), self.dice.uniform(0, 1000))
        process.register = Register(lambda content: None)

        def send(to: ReplicaPlace, message: RaftMessage) -> None:
            self._send(process, to, message)

        dice = random.Random(self.dice.random())
        process.raft = self._make(process.place, configuration, TIMING, dice, send, process.register)
        process.raft.log = WatchedLog(configuration, self.rules, lambda: process.raft.ballot.term)
        self.processes[process.place.id] = process
        if not configuration:
            self._at(self.now + self.dice.uniform(0, TICK), self._tick, process)
        return process

    def _tick(self, process: Process) -> None:
        if process.place.id not in self.processes:
            return
        process.raft.tick(process.clock(self.now))
        self._look(process)
        self._mend(process)
        self._at(self.now + TICK * self.dice.uniform(0.8, 1.2), self._tick, process)

    def _mend(self, process: Process) -> None:
        """What a leader does about who votes: it teaches new replicas, takes them in, and leaves silent ones out."""
        raft, now = process.raft, process.clock(self.now)
        if raft.leadership is None:
            return
        voters = raft.log.configuration
        if silent := raft.silent(now):
            left = tuple(one for one in voters if one != silent[0])
            if raft.reaches(left, now):
                raft.change(left, now)
        elif len(voters) < self._size:
            for other in self.processes.values():
                raft.learn(other.place, now)
            learned = [one for one in raft.leadership.learners if one.id in self.processes and raft.has_learned(one.id)]
            if learned and learned[0] not in voters:
                raft.change((*voters, learned[0]), now)
        self._look(process)

    def _look(self, process: Process) -> None:
        """Hold a process that has just done something against the rules."""
        self.steps += 1
        raft = process.raft
        if raft.leadership is not None and process.led != raft.ballot.term:
            process.led = raft.ballot.term
            self.rules.leads(raft)
        if process.register.value != self.rules.values.get(raft.log.commit, b"?"):
            raise Broken("a state is not what its entries make")
        leading = [one for one in self.processes.values() if one.raft.leadership is not None]
        if len(leading) > 1 and sum(one.raft.is_leased(one.clock(self.now)) for one in leading) > 1:
            raise Broken("two replicas have a lease at the same time")

    # --- the network
    def _send(self, process: Process, to: ReplicaPlace, message: RaftMessage) -> None:
        if (process.place.id, to.id) in self._cut or self.dice.random() < self._weather.lost:
            return
        copies = 2 if self.dice.random() < self._weather.repeated else 1
        for _ in range(copies):
            is_late = self.dice.random() < self._weather.late
            delay = self.dice.uniform(0, self._weather.most_late) if is_late else self.dice.uniform(0.001, 0.02)
            self._at(self.now + delay, self._deliver, (to.id, message))

    def _deliver(self, letter: tuple[str, RaftMessage]) -> None:
        process = self.processes.get(letter[0])
        if process is not None:
            process.raft.step(letter[1], process.clock(self.now))
            self._look(process)

    def _new_weather(self) -> Weather:
        if self.dice.random() < 0.3:
            return Weather(0, 0, 0, 0.0)
        most_late = self.dice.choice((0.1, 0.5, 4.0))
        return Weather(self.dice.uniform(0, 0.3), self.dice.uniform(0, 0.2), self.dice.uniform(0, 0.3), most_late)

    def _strike(self, _: None) -> None:
        """Something befalls links or processes, and the next one follows, until the schedule ends."""
        if self.now > self._lasts:
            return
        ids = list(self.processes)
        match self.dice.randrange(8):
            case 0 | 1:
                cut = set(self.dice.sample(ids, self.dice.randrange(1, len(ids)))) if len(ids) > 1 else set()
                self._cut = {(a, b) for a in ids for b in ids if (a in cut) != (b in cut)}
            case 2:
                self._cut |= {(a, b) for a in ids for b in ids if a != b and self.dice.random() < 0.4}
            case 3:
                leads = [one.place.id for one in self.processes.values() if one.raft.leadership is not None]
                self._cut |= {(a, b) for a in ids for b in leads if self.dice.random() < 0.9}
            case 4:
                self._crash()
            case 5:
                self._weather = self._new_weather()
            case 6:
                for one in self.processes.values():
                    one.raft.hand_over(one.clock(self.now))
                    self._look(one)
            case _:
                self._cut = set()
        self._at(self.now + self.dice.uniform(0.3, 5), self._strike, None)

    def _crash(self) -> None:
        """End a process for ever. A new one may come, which is another replica and knows nothing."""
        ended = self.dice.choice(list(self.processes))
        if len(self.processes) > 1:
            del self.processes[ended]
            if self.dice.random() < 0.7:
                self.start((), 100 + next(self._order))

    def _has_majority(self) -> bool:
        """Whether every configuration that may count has a majority of living replicas."""
        found = [one.raft.log.configuration for one in self.processes.values() if one.raft.log.configuration]
        found += [entry.configuration for _, entry, _ in self.rules.committed.values() if entry.configuration][-1:]
        return bool(found) and all(2 * sum(one.id in self.processes for one in who) > len(who) for who in found)

    # --- clients
    def _act(self, client: Client) -> None:
        """Look after the write under way, or begin something at any replica that takes itself for the leader."""
        if client.waits is not None:
            process, term, index, value, start = client.waits
            log = process.raft.log
            is_here = process.place.id in self.processes and log.offset <= index <= log.last_index
            if is_here and log.term(index) == term and log.commit >= index:
                self.history.append(Operation(True, value, start, self.now))
                client.waits = None
            elif not is_here or self.now > start + 4:
                self._give_up(client)
        leads = [one for one in self.processes.values() if one.raft.leadership is not None]
        if client.waits is None and leads and len(self.history) < 40:
            process = self.dice.choice(leads)
            clock = process.clock(self.now)
            if self.dice.random() < 0.5:
                client.count += 1
                value = f"{self._clients.index(client)} {client.count}".encode()
                found = process.raft.propose(value, clock)
                self._look(process)
                if found is not None:
                    client.waits = (process, *found, value, self.now)
            elif process.raft.is_leased(clock):
                self.history.append(Operation(False, process.register.value, self.now, self.now))
        self._at(self.now + self.dice.uniform(0.005, 0.6), self._act, client)

    def _give_up(self, client: Client) -> None:
        """Nobody will know whether this write happened."""
        if client.waits is not None:
            self.history.append(Operation(True, client.waits[3], client.waits[4], math.inf))
            client.waits = None

    def _at(self, when: float, what: Callable[..., None], argument: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, argument))
