"""Peak activation memory: plays a rank's schedule op by op, and adds up what the passes under way keep."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tllm.planner.cost.activations import logits_bytes, recomputed_bytes, run_bytes, split_backward_bytes
from tllm.planner.cost.rank_work import RankWork, ScheduleKey, cached_schedule, forward_only_layers, schedule_key
from tllm.spec.model_spec import ModelSpec
from tllm.spec.pipeline_schedule import Op, Schedule, StageChunk
from tllm.spec.plan import Plan


class LiveActivations(NamedTuple):
    """Bytes that are live on a rank in one step."""

    activations: int
    """Of layers, at the moment at which layers and logits together are largest."""
    logits: int
    """Of logits at that moment."""
    layers_peak: int
    """Of layers, at the moment at which they alone are largest."""


class ChunkActivations(NamedTuple):
    """Bytes of one microbatch on one chunk of a stage."""

    kept: int
    """What its forward pass keeps for its backward pass."""
    logits: int
    """The same of logits; 0 unless the chunk ends the model."""
    split: int
    """What waits between the two halves of a split backward pass, recomputed activations included."""
    recomputed: int
    """What one layer has while its backward pass works on recomputed activations: of the largest layer."""


def live_activation_bytes(spec: ModelSpec, plan: Plan, work: RankWork) -> LiveActivations:
    """The peak of one rank in one step."""
    if not work.microbatches:
        return LiveActivations(0, 0, 0)
    chunks = tuple(_chunk_bytes(spec, plan, work, run) for run in work.learning(spec))
    key = schedule_key(plan, work.microbatches, forward_only_layers(spec, work))
    return _peak(key, work.at.stage, chunks)


def _chunk_bytes(spec: ModelSpec, plan: Plan, work: RankWork, run: range) -> ChunkActivations:
    if not run:  # nothing is kept for a backward pass
        return ChunkActivations(0, 0, 0, 0)
    recomputed = [recomputed_bytes(spec, number, work.cut, work.batch, plan.recompute) for number in run]
    is_last = run.stop == spec.num_layers
    return ChunkActivations(
        kept=run_bytes(spec, run, work.cut, work.batch, plan.recompute),
        logits=logits_bytes(spec, work.cut, work.batch) if is_last else 0,
        split=split_backward_bytes(spec, run, work.cut, work.batch) + sum(recomputed),
        recomputed=max(recomputed),
    )


@lru_cache(256)
def _peak(key: ScheduleKey, stage: int, chunks: tuple[ChunkActivations, ...]) -> LiveActivations:
    """The peak of one stage; cached, as most of its ranks are alike."""
    schedule = cached_schedule(key)
    live = _Live(schedule, stage, chunks)
    for op in schedule.lists[stage]:
        live.play(op)
    return LiveActivations(*live.peak, live.layers_peak)


class _Live:
    """The bytes that are live, op by op, and their peaks."""

    def __init__(self, schedule: Schedule, stage: int, chunks: tuple[ChunkActivations, ...]) -> None:
        self.schedule, self.stage, self.chunks = schedule, stage, chunks
        self.layers, self.logits = 0, 0
        self.peak, self.layers_peak = (0, 0), 0

    def play(self, op: Op) -> None:
        """Add what an op keeps and take away what it gives back.

        The first stage sends no gradient: there `backward_input` does nothing, and `backward_weight` does all.
        """
        chunk = self.chunks[op.chunk]
        sends_nothing = not self.schedule.wants_input_gradient(StageChunk(self.stage, op.chunk))
        if op.kind == "forward":
            self._add(chunk.kept, chunk.logits)
        elif op.kind == "backward_weight" and not sends_nothing:
            self._add(-chunk.kept - chunk.split, -chunk.logits)
        elif op.kind == "backward_input":
            self._add(0 if sends_nothing else chunk.split, 0)
        else:
            # The logits are gone by the time the last layer is recomputed.
            self._add(chunk.recomputed, -chunk.logits)
            self._add(-chunk.kept - chunk.recomputed, 0)

    def _add(self, layers: int, logits: int) -> None:
        self.layers, self.logits = self.layers + layers, self.logits + logits
        self.peak = max(self.peak, (self.layers, self.logits), key=sum)
        self.layers_peak = max(self.layers_peak, self.layers)
