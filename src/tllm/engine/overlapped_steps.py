"""`OverlappedSteps`: a device begins the next step before the host knows the last one's tokens.

A step of replies needs little from the host: the ids of its rows are the tokens that the device has just chosen, and
all else, the next position and its page, follows without them. So the driver goes on like this, on a stage that is the
whole model and whose steps are recorded:

1. The layers of step k are under way. The scheduler makes step k + 1 of the same sequences, but for those that end by
   their length (`step_after`).
2. The device is told to choose the tokens of step k, to copy them to the host, and to compute the layers of k + 1.
3. The host waits for the tokens alone. Then it accepts and delivers them, and obeys new commands, while the device
   computes.

A sequence that turns out to have ended has a row in step k + 1, whose token is dropped. Its pages may have another
owner then, but only in steps that are begun later, and a device computes steps in order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tllm.devices.host_copy import HostCopy
from tllm.engine.decode_graphs import DecodeGraphs
from tllm.engine.decode_recordings import RecordedSteps
from tllm.engine.schedule.batch import Batch, BatchEntry, Results
from tllm.engine.schedule.scheduler import ScheduledChunk, ScheduledStep, Scheduler
from tllm.engine.schedule.sequence import SequenceState
from tllm.engine.stage import PipelineStage


class FollowingSteps(RecordedSteps, Protocol):
    """Recorded steps that need not be told their ids: `DecodeGraphs`."""

    def follow(self, batch: Batch, sources: Sequence[int], tokens_R: Tensor) -> Tensor: ...


class OverlappedSteps:
    """The steps of a stage that holds the whole model, on one rank. One is under way at most when `start` is called."""

    def __init__(self, stage: PipelineStage, scheduler: Scheduler, graphs: FollowingSteps) -> None:
        self._stage, self._scheduler, self._graphs = stage, scheduler, graphs
        self._x_TD: Tensor | None = None  # after the layers of the step under way
        self._began = 0.0

    @torch.inference_mode()
    def start(self, step: ScheduledStep) -> bool:
        """Begin a step of replies and do not wait for it. False for one whose tokens ask more of the host."""
        batch = step.batch
        if not self._graphs.takes(batch) or not all(map(is_chosen_by_device, batch.entries)):
            return False
        self._began = time.perf_counter()
        self._x_TD = self._graphs(batch, None)
        return True

    @torch.inference_mode()
    def finish(self, step: ScheduledStep) -> tuple[Results, ScheduledStep | None]:
        """The results of the step under way, and the step that the device has begun meanwhile, if there is one."""
        stage, sampler, x_TD, batch = self._stage, self._stage.sampler, self._x_TD, step.batch
        assert sampler is not None and x_TD is not None, "the step was begun by `start`, or after the one before"
        following = step_after(step, self._scheduler)
        tokens_R, vocab_size = sampler.token_ids(x_TD, batch), stage.limits.vocab_size
        on_host = HostCopy(tokens_R)
        if following is not None:
            assert all(map(is_chosen_by_device, following.batch.entries)), (
                "nothing of these waits for this step's tokens"
            )
            # What stands for a token that could not be drawn has no embedding; the host will end its reply.
            ids_R = tokens_R.clamp(max=vocab_size - 1)
            self._x_TD = self._graphs.follow(following.batch, following.sources, ids_R)
        token_ids = on_host.wait().tolist()
        now = time.perf_counter()
        stage.counters.count(batch, now - self._began)
        stage.batches, self._began = stage.batches + 1, now
        return Results(number=batch.number, token_ids=tuple(token_ids)), following


def step_after(step: ScheduledStep, scheduler: Scheduler) -> ScheduledStep | None:
    """The step after one of replies that is under way, a token more of each sequence that goes on.

    One that turns out to have ended gets it in vain, as do those that are cancelled meanwhile. None where another could
    begin beside it, none goes on, or a page is missing: then all is decided when the tokens are there.
    """
    if any(sequence.pending for sequence in scheduler.running):
        return None
    going_on = [
        (place, one)
        for place, one in enumerate(step.sequences)
        if one.state is SequenceState.RUNNING and one.num_output + 1 < one.request.params.max_tokens
    ]
    if not going_on or not all(scheduler.pages.cover(one, one.scheduled + 1) for _, one in going_on):
        return None
    # Those that run come first, so one that waits has what pages these leave.
    waiting = scheduler.next_to_begin()
    if waiting is not None and scheduler.pages.has_room(waiting):
        return None
    sources = tuple(place for place, _ in going_on)
    return scheduler.make_step([ScheduledChunk(one, 1, []) for _, one in going_on], sources)


def is_chosen_by_device(entry: BatchEntry) -> bool:
    """Whether the token of an entry, and of those after it, needs nothing of the host: no text so far, no grammar, no
    log-probability, no trace."""
    sampling = entry.sampling
    if sampling is None or sampling.history or sampling.banned or sampling.logprobs is not None:
        return False
    return not (entry.masks or entry.targets or entry.trace)


def overlapped_steps(stage: PipelineStage, scheduler: Scheduler) -> OverlappedSteps | None:
    """Those of a stage that is the whole model; None where its steps are not recorded on a device, where drafts or
    pages on disk go beside them."""
    if not isinstance(stage.graphs, DecodeGraphs) or stage.ring is not None or stage.pages.store is not None:
        return None
    return None if scheduler.speculation is not None else OverlappedSteps(stage, scheduler, stage.graphs)
