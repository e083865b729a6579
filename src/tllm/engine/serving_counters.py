"""What a rank counts while it serves: `ReplyCounters` on every rank, `StepTimes` on the driver's, which also tells how
much of prompts is computed.

Both look at batches that give each of their sequences its next token (`Batch.is_decode`); prompts are left out, but
for `compute_seconds`. The coordinator reads the numbers from heartbeats and compares them with what the planner
predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tllm.comm.collectives.group import Group
from tllm.engine.schedule.batch import Batch
from tllm.engine.schedule.scheduler import ScheduledStep
from tllm.engine.schedule.speculative_decoding import Speculation
from tllm.spec.request import Output


class ReplyCounters:
    """Sums over the batches that one rank has computed for replies.

    `batches`, the `sequences` and `rows` (tokens) in them, and the `keys` (tokens of context) that these sequences had.
    `seconds` are those of computing, without what the collectives of the `groups` took; `compute_seconds` are the
    same of all batches, those of prompts too. Of steps that overlap the host's work they are from one step's tokens to
    the next one's.
    """

    def __init__(self, *groups: Group) -> None:
        self.batches = self.sequences = self.rows = self.keys = 0
        self.seconds = self.compute_seconds = 0.0
        self._groups = groups

    @contextmanager
    def counting(self, batch: Batch) -> Iterator[None]:
        """Count a batch, which is computed in the `with` block."""
        began, collectives = time.perf_counter(), self._collectives()
        yield
        self.count(batch, time.perf_counter() - began - (self._collectives() - collectives))

    def count(self, batch: Batch, seconds: float) -> None:
        """Count a batch that took so long to compute."""
        self.compute_seconds += seconds
        if batch.is_decode:
            self.seconds += seconds
            self.batches += 1
            self.sequences += len(batch.entries)
            self.rows += len(batch.token_ids)
            self.keys += sum(entry.stop for entry in batch.entries)

    def _collectives(self) -> float:
        return sum(group.seconds for group in self._groups)

    def stats(self) -> dict[str, float]:
        """For the heartbeat."""
        return {
            "reply_batches": self.batches,
            "reply_sequences": self.sequences,
            "reply_rows": self.rows,
            "reply_keys": self.keys,
            "reply_seconds": self.seconds,
            "compute_seconds": self.compute_seconds,
        }


class StepTimes:
    """How long a driver's steps take, from the scheduling of a batch until its results are there.

    Speculation learns from every one of them what a row costs. The sums of `stats` are over steps whose batch was alone
    in the ring: only these show what one token takes, without waiting for other batches.
    """

    def __init__(self, speculation: Speculation | None) -> None:
        self.lone_steps, self.lone_step_seconds = 0, 0.0
        self._speculation = speculation

    def record(self, step: ScheduledStep, seconds: float, was_alone: bool) -> None:
        """Take in one step. What a draft model took for it is not the batch's, and counted apart."""
        batch = step.batch
        if not batch.is_decode:
            return
        if self._speculation is not None:
            has_drafts = any(entry.num_draft_tokens for entry in batch.entries)
            self._speculation.cost.record(len(batch.token_ids), seconds - step.draft_seconds, has_drafts)
        if was_alone:
            self.lone_steps, self.lone_step_seconds = self.lone_steps + 1, self.lone_step_seconds + seconds

    def stats(self) -> dict[str, float]:
        """For the heartbeat."""
        return {"turns": self.lone_steps, "turn_seconds": self.lone_step_seconds}


def tell_of_prompts(step: ScheduledStep, tell: Callable[[list[Output]], None]) -> None:
    """Tell how much of each prompt is computed or under way, if this step computes a part of one that has no token.

    Of what a sequence found in the cache, and has to compute since it was preempted, nothing is told.
    """
    told = [
        Output(request_id=sequence.request.id, computed_tokens=computed)
        for entry, sequence in zip(step.batch.entries, step.sequences, strict=True)
        if entry.start < sequence.prompt_length and not sequence.num_output
        if (computed := min(entry.stop, sequence.prompt_length) - (sequence.prefix.found or 0)) > 0
    ]
    if told:
        tell(told)
