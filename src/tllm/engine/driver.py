"""The leader of stage 0: keeps the ring full of batches, closes it, and hands out new tokens."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable

import msgspec

from tllm.core.errors import FrameError, RequestError
from tllm.engine.reply_counters import is_reply
from tllm.engine.schedule.batch import Results, RingHeartbeat, StopRing
from tllm.engine.schedule.scheduler import ScheduledStep, Scheduler
from tllm.engine.stage import PipelineStage
from tllm.spec.request import Output, Request

BEAT_EVERY = 5.0
"""Seconds after which an idle driver sends a beat round the ring; links need a deadline of several times that."""


class CancelRequest(msgspec.Struct, frozen=True):
    """Drop this request."""

    request_id: str


class CloseRing(msgspec.Struct, frozen=True):
    """End every request as cancelled, and the ring in order."""


Command = Request | CancelRequest | CloseRing
Deliver = Callable[[list[Output]], None]


class Driver:
    """Runs one replica from its first rank, in one thread. Not to be called from two threads; `run` takes a queue.

    While nothing is under way a beat goes round every `beat_every` seconds, so that each wait of each rank can keep
    its link's deadline and a node that is lost is missed within it even when nobody asks for anything.
    """

    def __init__(self, stage: PipelineStage, scheduler: Scheduler, beat_every: float = BEAT_EVERY) -> None:
        self.stage = stage
        self.scheduler = scheduler
        self.beat_every = beat_every
        self.under_way: deque[tuple[ScheduledStep, Results | None, float]] = deque()  # each with when it began
        self.turns, self.turn_seconds = 0, 0.0  # of replies' batches that were alone in the ring

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.under_way)

    def submit(self, request: Request) -> list[Output]:
        """Queue a request. One that cannot be served ends at once with an error; others go on."""
        try:
            self.scheduler.add(request)
        except RequestError as error:
            return [Output(request_id=request.id, finish_reason="error", error=str(error))]
        return []

    def cancel(self, request_id: str) -> list[Output]:
        output = self.scheduler.cancel(request_id)
        return [] if output is None else [output]

    def step(self) -> list[Output]:
        """Fill the ring, then take the results of the oldest batch under way."""
        before, now = len(self.under_way), time.perf_counter
        while len(self.under_way) < self.scheduler.depth:
            began, step = now(), self.scheduler.schedule()
            if step is None:
                break
            self.under_way.append((step, self.stage.start(step.batch), began))
        if not self.under_way:
            assert not self.scheduler.has_work, "there is work and nothing to compute"
            return []
        is_alone = before == 0 and len(self.under_way) == 1
        step, results, began = self.under_way.popleft()
        results = self.stage.finish(step.batch) if results is None else results
        if is_reply(step.batch):
            self._took(step, now() - began, is_alone)
        return self.scheduler.accept(step, results)

    def _took(self, step: ScheduledStep, seconds: float, is_alone: bool) -> None:
        if self.scheduler.speculation is not None:
            drafted = any(entry.drafted for entry in step.batch.entries)
            self.scheduler.speculation.cost.took(len(step.batch.token_ids), seconds, drafted)
        if is_alone:
            self.turns, self.turn_seconds = self.turns + 1, self.turn_seconds + seconds

    def beat(self) -> None:
        """Go once round the idle ring."""
        self._round(RingHeartbeat())

    def close(self) -> list[Output]:
        """End every request, wait for what is under way, and stop every other rank."""
        outputs = [out for request_id in list(self.scheduler.by_id) for out in self.cancel(request_id)]
        while self.under_way:
            outputs += self.step()
        self._round(StopRing())
        return outputs

    def run(self, inbox: queue.SimpleQueue[Command], deliver: Deliver) -> None:
        """Serve commands until Close; `deliver` is called from this thread. Raises what a link or the model raises."""
        while True:
            for command in self._commands(inbox):
                if isinstance(command, CloseRing):
                    deliver(self.close())
                    return
                outputs = (
                    self.cancel(command.request_id) if isinstance(command, CancelRequest) else self.submit(command)
                )
                if outputs:
                    deliver(outputs)
            if self.has_work:
                outputs = self.step()
                if outputs:
                    deliver(outputs)

    def stats(self) -> dict[str, float]:
        turns = {"turns": self.turns, "turn_seconds": self.turn_seconds}
        ring = {"batches": self.stage.batches, "batches_in_flight": len(self.under_way)}
        return {**self.scheduler.stats(), **ring, **turns}

    def _commands(self, inbox: queue.SimpleQueue[Command]) -> list[Command]:
        """All commands that are there; waits for one, beating, while there is nothing to do."""
        commands: list[Command] = []
        while not self.has_work and not commands:
            try:
                commands.append(inbox.get(timeout=self.beat_every))
            except queue.Empty:
                self.beat()
        while not inbox.empty():
            commands.append(inbox.get())
        return commands

    def _round(self, message: RingHeartbeat | StopRing) -> None:
        assert not self.under_way, "beats and stops go round an idle ring"
        self.stage.send_round(message)
        if self.stage.ring is not None:
            came = self.stage.receive_round()
            if came != message:
                raise FrameError(f"{type(came).__name__} came round the ring after {type(message).__name__} was sent")
