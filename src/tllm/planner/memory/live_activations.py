"""What passes under way keep on a rank: its schedule played op by op."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tllm.planner.cost.activations import logits_bytes, recomputed_bytes, run_bytes, split_backward_bytes
from tllm.planner.cost.rank_work import RankWork, cached_schedule
from tllm.spec.model_spec import ModelSpec
from tllm.spec.pipeline_schedule import Depth, Op, Schedule
from tllm.spec.plan import Plan


class LiveActivations(NamedTuple):
    """Bytes of layers and of logits where a step has most of both together, and the most of layers `layers_peak`."""

    activations: int
    logits: int
    layers_peak: int


def live_activation_bytes(spec: ModelSpec, plan: Plan, work: RankWork) -> LiveActivations:
    """Of one step."""
    if not work.microbatches:
        return LiveActivations(0, 0, 0)
    kept = [run_bytes(spec, run, work.cut, work.batch, plan.recompute) for run in work.runs]
    again = [[recomputed_bytes(spec, n, work.cut, work.batch, plan.recompute) for n in run] for run in work.runs]
    halves = [
        split_backward_bytes(spec, run, work.cut, work.batch) + sum(made)
        for run, made in zip(work.runs, again, strict=True)
    ]
    once = [max(made) for made in again]
    of_logits = [_logits(spec, run, work) for run in work.runs]
    sizes = (tuple(kept), tuple(halves), tuple(once), tuple(of_logits))
    return _most(plan.schedule, plan.pp, work.microbatches, plan.depth, plan.chunks, work.at.stage, *sizes)


@lru_cache(256)
def _most(
    order: str, pp: int, microbatches: int, depth: Depth, chunks: int, stage: int, *sizes: tuple[int, ...]
) -> LiveActivations:
    """Of one stage; its ranks are mostly alike."""
    schedule = cached_schedule(order, pp, microbatches, depth, chunks)
    live = _Live(schedule, stage, *sizes)
    for op in schedule.lists[stage]:
        live.play(op)
    return LiveActivations(*live.most, live.alone)


class _Live:
    """Adds up what is kept, op by op, and remembers when it was most."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        kept: tuple[int, ...],
        halves: tuple[int, ...],
        once: tuple[int, ...],
        logits: tuple[int, ...],
    ) -> None:
        self.schedule, self.stage = schedule, stage
        self.kept, self.halves, self.once, self.logits = kept, halves, once, logits
        self.now, self.of_logits = 0, 0
        self.most, self.alone = (0, 0), 0

    def play(self, op: Op) -> None:
        """`backward_input` at the model's start does nothing: the whole pass waits for `backward_weight`."""
        kept, logits, half = self.kept[op.chunk], self.logits[op.chunk], self.halves[op.chunk]
        waits = op.kind != "forward" and self.schedule.sends(self.stage, op._replace(kind="backward")) is None
        if op.kind == "forward":
            self._move(kept, logits)
        elif op.kind == "backward_weight" and not waits:
            self._move(-kept - half, -logits)
        elif op.kind == "backward_input":
            self._move(0 if waits else half, 0)
        else:
            # Logits are gone when the first layer from the end is worked out again.
            self._move(self.once[op.chunk], -logits)
            self._move(-kept - self.once[op.chunk], 0)

    def _move(self, kept: int, logits: int) -> None:
        self.now, self.of_logits = self.now + kept, self.of_logits + logits
        self.most = max(self.most, (self.now, self.of_logits), key=sum)
        self.alone = max(self.alone, self.now)


def _logits(spec: ModelSpec, run: range, work: RankWork) -> int:
    return logits_bytes(spec, work.cut, work.batch) if run.stop == spec.num_layers else 0
