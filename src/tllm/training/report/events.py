"""The events of a run, as rank 0 reports them for all ranks, and what a rank says when it is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.report.metrics import StepRecord

Origin = Literal["start", "save", "memory"]
"""Where a run's numbers come from when it begins or goes on."""


TOLD_COMPLETIONS = 16
"""Completions of an evaluation that an event has at most, and with it the page: all of them are in their file."""


class RunBegan(msgspec.Struct, frozen=True, tag=True):
    """Every rank is ready. `step` steps were done before; `peak` is what all ranks' matrix products reach, flop/s.

    `parameters` are the model's, and `adapter_parameters` those that are trained in their place, 0 without an adapter.
    `network` says what links between machines measured and how rank 0 sums over them, `products` what it computes
    matrix products in, `disk` which disks lack room for the run's saves.
    """

    step: int
    parameters: int
    peak: float
    network: str = ""
    origin: Origin = "start"
    products: str = ""
    adapter_parameters: int = 0
    disk: str = ""


class RunStepped(msgspec.Struct, frozen=True, tag=True):
    """A step is done. After an evaluation `completions` are the first of rows held out."""

    record: StepRecord
    completions: tuple[CompletionRecord, ...] = ()


class RunSaved(msgspec.Struct, frozen=True, tag=True):
    """A save has ended. `error` says why it is not there; the run goes on without it."""

    step: int
    seconds: float
    nbytes: int
    error: str = ""


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The run has ended after `step` steps. `final` is the model's folder, "" where it goes on another time.

    `reason` says why it ended before the last step of the job, if evaluations ended it. The model is that of the step
    `model_step`; `choice` says why, where the job asks for the best.
    """

    step: int
    final: str = ""
    reason: str = ""
    model_step: int = 0
    choice: str = ""

    @property
    def of_step(self) -> str:
        """`, of step 8 (loss 2.31, the best of the saves)`; nothing of a model that is simply the last."""
        return f", of step {self.model_step} ({self.choice})" if self.choice else ""


class RunLostRank(msgspec.Struct, frozen=True, tag=True):
    """A node that had a part in the run is lost, after step `step`; `reason` names it."""

    step: int
    node: str
    reason: str


class RunResumed(msgspec.Struct, frozen=True, tag=True):
    """The run goes on after step `step`, `again` before the last that was told, and `seconds` after it was broken off.

    `nodes` are those of the plan's ranks, in order.
    """

    step: int
    again: int
    seconds: float
    plan: str
    nodes: tuple[str, ...]
    origin: Origin


class RunWaits(msgspec.Struct, frozen=True, tag=True):
    """The step after `step` cannot begin yet: `reason` says for whom the run waits."""

    step: int
    reason: str


RunEvent = RunBegan | RunStepped | RunSaved | RunEnded | RunLostRank | RunResumed | RunWaits

OnEvent = Callable[[RunEvent], None]
IsStopped = Callable[[], bool]
"""Whether this rank was asked to end the run after the present step."""


@dataclass(frozen=True)
class TrainerReady:
    """A rank before its first step: how many steps were done before, and the bytes of memory that it holds."""

    step: int
    parameter_bytes: int
    state_bytes: int


def encode(event: RunEvent) -> bytes:
    """As the control wire carries it."""
    return msgspec.msgpack.encode(event)


EVENTS: msgspec.msgpack.Decoder[RunEvent] = msgspec.msgpack.Decoder(RunEvent)
