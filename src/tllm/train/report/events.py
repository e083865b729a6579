"""What a run tells of itself while it goes on; rank 0 speaks for all."""

from __future__ import annotations

from typing import Literal

import msgspec

from tllm.train.report.metrics import StepRecord

Origin = Literal["start", "save", "memory"]
"""Where a run's numbers come from when it begins or goes on."""


class RunBegan(msgspec.Struct, frozen=True, tag=True):
    """Every rank is ready. `step` steps were done before; `peak` is what all ranks' matrix products reach, flop/s.

    `network` says what links between machines measured and how rank 0 sums over them.
    """

    step: int
    parameters: int
    peak: float
    network: str = ""
    origin: Origin = "start"


class RunStepped(msgspec.Struct, frozen=True, tag=True):
    """A step is done."""

    record: StepRecord


class RunSaved(msgspec.Struct, frozen=True, tag=True):
    """A save has ended. `error` says why it is not there; the run goes on without it.."""

    step: int
    seconds: float
    nbytes: int
    error: str = ""


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The run has ended after `step` steps. `final` is the model's folder, "" where the steps are not all done."""

    step: int
    final: str = ""


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


RunEvent = RunBegan | RunStepped | RunSaved | RunEnded | RunLostRank | RunResumed


def encode(news: RunEvent) -> bytes:
    """As the control wire carries it."""
    return msgspec.msgpack.encode(news)


def decode(content: bytes) -> RunEvent:
    """What `encode` made."""
    news: RunEvent = msgspec.msgpack.decode(content, type=RunEvent)
    return news
