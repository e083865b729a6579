"""A fault at a moment of serving: the streams that are open then, how it ends, and what is wrong with that."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.support.cluster.faulty_cluster import SETTLE_SECONDS, Fault, Faulty
from tests.support.cluster.history import History, faults_in
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.spec.request import SamplingParams

MOMENTS = ("load", "prefill", "decode", "idle")
FORMING = ("assigned", "prepared", "loading", "loaded")
BOUND, SLOW_BOUND = 30.0, 90.0
"""Seconds within which every stream must have ended after the fault; where the link is slow, and so is each token."""
HOLD_SECONDS = 7.0
"""How long a slow link lasts while nothing is asked: longer than the silence after which a node is lost."""
LOST_SECONDS = 15.0


class Question(msgspec.Struct, frozen=True):
    """A prompt and how it is to be continued."""

    prompt: tuple[int, ...]
    tokens: int
    seed: int | None = None

    @property
    def params(self) -> SamplingParams:
        if self.seed is None:
            return SamplingParams(max_tokens=self.tokens, temperature=0, ignore_eos=True)
        return SamplingParams(max_tokens=self.tokens, temperature=0.8, top_p=0.9, seed=self.seed, ignore_eos=True)

    @property
    def body(self) -> Mapping[str, Any]:
        """As HTTP asks it."""
        own = {} if self.seed is None else {"top_p": 0.9, "seed": self.seed}
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.tokens,
            "temperature": 0 if self.seed is None else 0.8,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **own,
        }


SHORT = (Question((1, 2, 3), 200), Question((4, 5, 6, 7), 200, seed=7))
LONG = tuple(Question(tuple((7 * n + 3 * at) % 101 for at in range(200)), 20) for n in range(8))
FEW = (Question((1, 2, 3), 20), Question((4, 5, 6, 7), 20, seed=7))
QUESTIONS = (*SHORT, *LONG, *FEW)


def golden(folder: Path) -> list[list[int]]:
    """The tokens of every question, by a process that has the whole model."""
    with Engine.load(folder, "pp=1", EngineConfig(dtype="float32", cache_tokens=4096)) as engine:
        return [engine.generate([one.prompt], one.params)[0] for one in QUESTIONS]


@dataclass(frozen=True)
class Outcome:
    """One run. Seconds are counted from the fault; None is what did not happen, or was not to."""

    fault: str
    moment: str
    seed: int
    node: str
    tokens: int  # given out before the fault
    named: float | None
    lost: float | None
    recovered: float | None
    ended: float | None
    wrong: tuple[str, ...]
    history: History


class Run:
    """One fault at one moment; `seed` says to whom it comes and when exactly."""

    def __init__(self, cluster: Faulty, truth: Sequence[Sequence[int]], fault: Fault, moment: str, seed: int) -> None:
        self.cluster, self.truth, self.fault, self.moment, self.seed = cluster, truth, fault, moment, seed
        self.dice = random.Random(f"{fault.name} {moment} {seed}")
        self.node = self.dice.choice(fault.victims(3))
        self.other = ""  # lost first, so that the others load again
        self.history = cluster.history = History()
        self.streams: list[threading.Thread] = []
        self.bound = SLOW_BOUND if fault.is_slow else BOUND

    def __call__(self) -> Outcome:
        before = self.cluster.settled_counts()
        getattr(self, f"_{self.moment}")()
        wrong = self._wait()
        self.fault.end(self.cluster, self.node)
        if self.other:
            self.cluster.join(int(self.other[-1]))
        self.cluster.until(self.cluster.is_whole, SETTLE_SECONDS, "the cluster to be whole again")
        return self._outcome(wrong + self.cluster.leaks(before))

    def _idle(self) -> None:
        self._strike()
        if self.fault.is_slow:
            time.sleep(HOLD_SECONDS)
        else:
            self.cluster.until(lambda: bool(self.history.of("lost")), LOST_SECONDS, f"{self.node} to be lost")
        self._ask(FEW)

    def _decode(self) -> None:
        self._ask(FEW if self.fault.by_relay else SHORT)
        self._await_tokens(self.dice.randint(2, 8) if self.fault.by_relay else self.dice.randint(5, 60))
        self._strike()

    def _prefill(self) -> None:
        self._ask(LONG)
        while len(self.history.of("asked")) < len(LONG):
            time.sleep(0.001)
        time.sleep(self.dice.uniform(0, 0.01))
        self._strike()

    def _load(self) -> None:
        """While the nodes that are left after another's end begin the next epoch."""
        self._ask(FEW if self.fault.by_relay else SHORT)
        self._await_tokens(2)
        self.other = next(node for node in ("host-1", "host-2") if node != self.node)
        epoch = self.cluster.status()["epoch"]
        self.cluster.nodes[self.other].kill()
        self.cluster.nodes[self.other].wait()

        def forms() -> bool:
            status = self.cluster.status()
            return status["epoch"] > epoch and any(one["phase"] in FORMING for one in status["nodes"])

        end = time.monotonic() + SETTLE_SECONDS
        while not forms():
            assert time.monotonic() < end, "no epoch began"
        self._strike()

    def _ask(self, questions: Sequence[Question]) -> None:
        for question in questions:
            number = QUESTIONS.index(question)
            body = {**question.body, "model": self.cluster.model}
            self.streams.append(self.cluster.ask(len(self.streams), number, body, self.bound))

    def _await_tokens(self, count: int) -> None:
        def least() -> int:
            return min(len(self.history.of("tokens", stream=stream)) for stream in range(len(self.streams)))

        while least() < count:
            assert not self.history.of("ended"), "it ended before the fault"
            time.sleep(0.001)

    def _strike(self) -> None:
        phases = {one["node"]: one["phase"] for one in self.cluster.status()["nodes"]}
        self.fault.begin(self.cluster, self.node, self.dice)
        tokens = sum(len(event["ids"]) for event in self.history.of("tokens"))
        facts = dict(name=self.fault.name, moment=self.moment, node=self.node, seed=self.seed)
        self.history.add("fault", tokens=tokens, phases=phases, **facts)

    def _wait(self) -> list[str]:
        """Until every stream has ended, or should have; what is wrong then."""
        end = time.monotonic() + self.bound + 5
        for stream in self.streams:
            stream.join(max(end - time.monotonic(), 0))
        wrong = ["a stream hangs"] if any(stream.is_alive() for stream in self.streams) else []
        wrong += [f"stream {event['stream']} broke: {event['why']}" for event in self.history.of("broken")]
        wrong += faults_in(self.history, self.truth, self.bound, [self.node, self.other or self.node])
        if not self.fault.is_slow and not self.history.of("lost", node=self.node):  # it may be noticed after the end
            self.cluster.until(lambda: bool(self.history.of("lost", node=self.node)), LOST_SECONDS, "the loss")
        allowed = {self.other} if self.fault.is_slow else {self.node, self.other}
        innocent = {event["node"] for event in self.history.of("lost")} - allowed
        return wrong + [f"{node} was taken for lost" for node in sorted(innocent)]

    def _outcome(self, wrong: list[str]) -> Outcome:
        (fault,) = self.history.of("fault")

        def seconds(events: Sequence[Any]) -> float | None:
            return round(min(event.at for event in events) - fault.at, 3) if events else None

        lost = self.history.of("lost", fault.at, node=self.node)
        told = self.history.of("/health/progress", fault.at, status=503)
        named = [event for event in told if self.node in event["message"]]
        since = lost[0].at if lost else fault.at
        firsts = [self.history.of("tokens", since, stream=stream)[:1] for stream in range(len(self.streams))]
        back = [one[0].at for one in firsts if one] if self.moment != "idle" else []
        ready = seconds(self.history.of("/health/ready", since, status=200)) if lost else None
        return Outcome(
            fault=self.fault.name,
            moment=self.moment,
            seed=self.seed,
            node=self.node,
            tokens=fault["tokens"],
            named=seconds([*named, *lost]),
            lost=seconds(lost),
            recovered=round(max(back) - fault.at, 3) if back else ready,
            ended=round(max((e.at for e in self.history.of("ended")), default=fault.at) - fault.at, 3),
            wrong=tuple(wrong),
            history=self.history,
        )
