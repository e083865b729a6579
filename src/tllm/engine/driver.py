"""`Driver`: the loop of a replica's first rank, from a queued request to its tokens.

In each turn of the loop `run` does four things:

1. It takes the commands that have come: requests, cancellations, the end.
2. `step` asks the scheduler for batches until the ring is full: as many are in flight as there are stages. Messages
   about pages on disk go between them (page_moves.py).
3. `step` waits for the results of the oldest batch in flight and gives them to the scheduler.
4. It delivers the new tokens. Where a device can go on without the host (overlapped_steps.py), it computes meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tllm.core.errors import FrameError, RequestError
from tllm.engine.overlapped_steps import OverlappedSteps
from tllm.engine.page_moves import CLOSE_SECONDS, PageMoves, PagesInFlight
from tllm.engine.schedule.batch import ForgetAdapter, Results, RingHeartbeat, StopRing
from tllm.engine.schedule.scheduler import ScheduledStep, Scheduler
from tllm.engine.serving_counters import StepTimes, tell_of_prompts
from tllm.engine.stage import PipelineStage
from tllm.engine.waiting.grammar_compiler_thread import GrammarCompilerThread, GrammarReady
from tllm.spec.request import Output, Request

HEARTBEAT_SECONDS = 5.0
"""An idle driver sends a heartbeat round the ring this often; links need a deadline of several times that."""


class CancelRequest(msgspec.Struct, frozen=True):
    """Drop this request."""

    request_id: str


class CloseRing(msgspec.Struct, frozen=True):
    """End every request as cancelled, and the ring in order."""


Command = Request | GrammarReady | CancelRequest | ForgetAdapter | CloseRing
Deliver = Callable[[list[Output]], None]


class InFlight(NamedTuple):
    """A batch in the ring: its results, if this is the only stage, and when its step began (`time.perf_counter`)."""

    step: ScheduledStep
    results: Results | None
    began: float


class Driver:
    """Runs one replica from its first rank, in one thread. Not to be called from two threads; `run` takes a queue.

    Where nothing has gone round the ring for `heartbeat_seconds`, a heartbeat does. So every wait of every rank can
    have its link's deadline, and a node that is lost is missed within it even when nobody asks for what can be served.
    """

    def __init__(
        self, stage: PipelineStage, scheduler: Scheduler, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self.stage = stage
        self.scheduler = scheduler
        self.heartbeat_seconds = heartbeat_seconds
        self.overlap: OverlappedSteps | None = None
        self.page_moves = PageMoves(stage.pages, scheduler.pages)
        self.in_flight: deque[InFlight | PagesInFlight] = deque()
        self.step_times = StepTimes(scheduler.speculation)
        self._next_beat = time.monotonic() + heartbeat_seconds

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a batch is in flight, or pages are to be saved."""
        return self.scheduler.has_work or bool(self.in_flight) or self.page_moves.has_work

    def run(self, inbox: queue.SimpleQueue[Command], deliver: Deliver) -> None:
        """Serve commands until CloseRing; `deliver` is called from this thread.

        Raises what a link or the model raises.
        """
        with GrammarCompilerThread(self.scheduler.grammars, inbox.put) as grammars:
            while True:
                for command in self._commands(inbox):
                    if isinstance(command, CloseRing):
                        deliver(grammars.cancel_all() + self.close())
                        return
                    if outputs := self._obey(command, grammars):
                        deliver(outputs)
                if self.has_work and (outputs := self.step(deliver)):
                    deliver(outputs)

    def submit(self, request: Request) -> list[Output]:
        """Queue a request. One that cannot be served ends at once with an error; others go on."""
        try:
            self.stage.adapters.check(request)
            self.scheduler.add(request)
        except RequestError as error:
            return [Output(request_id=request.id, finish_reason="error", error=str(error))]
        return []

    def cancel(self, request_id: str) -> list[Output]:
        """Drop a request; nothing, if it has just ended."""
        return [] if (output := self.scheduler.cancel(request_id)) is None else [output]

    def forget_adapter(self, message: ForgetAdapter) -> list[Output]:
        """Let every rank drop an adapter, after the batches under way; its requests, if any are left, are cancelled."""
        named = [one.request.id for one in self.scheduler.by_id.values() if one.request.lora == message.lora]
        outputs = [output for request_id in named for output in self.cancel(request_id)]
        self.stage.send_round(message)
        self.stage.adapters.remove(message)
        return outputs

    def step(self, tell: Deliver = lambda outputs: None) -> list[Output]:
        """Fill the ring with batches, `tell` how much of prompts they compute, then take the oldest one's results."""
        was_idle = not self.in_flight
        while len(self.in_flight) < self.scheduler.depth:
            began, step = time.perf_counter(), self.scheduler.schedule()
            # Pages that this batch writes over may have to be saved before.
            self.in_flight += self.page_moves.send(is_idle=step is None and not self.in_flight)
            if step is None:
                break
            # Before that is computed, so that it is known of those, too, that are cancelled meanwhile.
            tell_of_prompts(step, tell)
            self.in_flight.append(InFlight(step, self._start(step), began))
        expired = self.scheduler.expire()  # after those that could begin have
        if not self.in_flight:
            assert not self.scheduler.has_work or self.page_moves.has_moved, "there is work and nothing to compute"
            self.beat_if_due()
            return expired
        was_alone = len(self.in_flight) == 1 and (was_idle or self.overlap is not None)
        oldest = self.in_flight.popleft()
        self._next_beat = time.monotonic() + self.heartbeat_seconds
        if isinstance(oldest, PagesInFlight):
            self.page_moves.accept(oldest, self.stage.receive_round())
            return expired
        step, results, began = oldest
        if results is None and self.scheduler.speculation is not None:
            self.scheduler.speculation.prepare(self.scheduler.running)
        results = self._finish(step) if results is None else results
        self.step_times.record(step, time.perf_counter() - began, was_alone)
        return expired + self.scheduler.accept(step, results)

    def beat_if_due(self) -> None:
        """Send a heartbeat round the idle ring, where nothing has gone round it for so long."""
        if time.monotonic() >= self._next_beat:
            self._send_round_idle_ring(RingHeartbeat())

    def close(self) -> list[Output]:
        """End every request, wait for what is in flight, and stop every other rank."""
        outputs = [out for request_id in list(self.scheduler.by_id) for out in self.cancel(request_id)]
        until = time.monotonic() + CLOSE_SECONDS
        while self.in_flight or (self.page_moves.has_work and time.monotonic() < until):
            outputs += self.step()
        self._send_round_idle_ring(StopRing())
        return outputs

    def stats(self) -> dict[str, float]:
        """Numbers of this moment, and totals since the start."""
        ring = {"batches": self.stage.batches, "batches_in_flight": len(self.in_flight)}
        return {**self.scheduler.stats(), **ring, **self.step_times.stats(), **self.page_moves.stats()}

    def _start(self, step: ScheduledStep) -> Results | None:
        """Begin a step; its results, if the host has waited for them."""
        if self.overlap is not None and self.overlap.start(step):
            return None
        return self.stage.start(step.batch)

    def _finish(self, step: ScheduledStep) -> Results:
        """The results of the oldest step. A device begins the one after it before the host knows them."""
        if self.overlap is None:
            return self.stage.finish(step.batch)
        results, following = self.overlap.finish(step)
        if following is not None:
            self.in_flight.append(InFlight(following, None, time.perf_counter()))
        return results

    def _obey(self, command: Command, grammars: GrammarCompilerThread) -> list[Output]:
        if isinstance(command, CancelRequest):
            return grammars.cancel(command.request_id) or self.cancel(command.request_id)
        if isinstance(command, ForgetAdapter):
            return self.forget_adapter(command)
        if isinstance(command, GrammarReady):
            return self.submit(command.request) if grammars.release(command) else []
        assert isinstance(command, Request), "`run` ends with CloseRing"
        return [] if grammars.hold_back(command) else self.submit(command)

    def _commands(self, inbox: queue.SimpleQueue[Command]) -> list[Command]:
        """All commands that are there; while there is nothing to do, waits for one and sends heartbeats."""
        commands: list[Command] = []
        while not self.has_work and not commands:
            self.beat_if_due()
            with contextlib.suppress(queue.Empty):
                commands.append(inbox.get(timeout=max(0.0, self._next_beat - time.monotonic())))
        return commands + [inbox.get() for _ in range(inbox.qsize())]

    def _send_round_idle_ring(self, message: RingHeartbeat | StopRing) -> None:
        assert not self.in_flight, "heartbeats and stops go round an idle ring"
        self.stage.send_round(message)
        self._next_beat = time.monotonic() + self.heartbeat_seconds
        if self.stage.ring is not None:
            came = self.stage.receive_round()
            if came != message:
                raise FrameError(f"{type(came).__name__} came round the ring after {type(message).__name__} was sent")
