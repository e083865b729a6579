"""`Trainer`: one rank of a run, from an empty model to the last save. Every rank makes the same calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from tllm.parallel.load_balance import LoadBalance
from tllm.parallel.mesh import mesh_of
from tllm.spec.model_spec import ModelSpec
from tllm.spec.pipeline_schedule import Schedule
from tllm.spec.pipeline_schedule import build as build_schedule
from tllm.spec.plan import Plan
from tllm.train.attention.context_parallel import cut_tokens
from tllm.train.attention.packed_attention import TrainAttend
from tllm.train.attention.ring_attention import RingAttention
from tllm.train.checkpoint.async_saves import AsyncSaves
from tllm.train.checkpoint.checkpoint import write_final
from tllm.train.checkpoint.commit import SaveResult
from tllm.train.data.batch_feed import BatchFeed, Portion
from tllm.train.job.job import Job
from tllm.train.job.job_parts import is_copied, rate_schedule
from tllm.train.job.run_start import Beginning
from tllm.train.learner_choice import learner_of
from tllm.train.measure.peak_flops import matrix_peak
from tllm.train.optim.flat_parameters import without_memory
from tllm.train.report.events import Origin, RunBegan, RunEnded, RunEvent, RunSaved, RunStepped
from tllm.train.report.metrics import Sink, sinks
from tllm.train.report.step_report import RankCounters, StepReport
from tllm.train.snapshot.replication import SnapshotReplicator
from tllm.train.state.initial_weights import STD, fill_randomly, shapes_of
from tllm.train.step.model_chunks import build_chunks
from tllm.train.step.objective import NextToken
from tllm.train.step.pipeline_step import StepResult, play
from tllm.train.step.rank_groups import Groups
from tllm.train.step.recompute import recompute
from tllm.train.sync.learner import Learner, state_place
from tllm.weights.byte_source import ByteSource
from tllm.weights.dtypes import torch_dtype
from tllm.weights.load import Progress, load
from tllm.weights.manifest import checked
from tllm.weights.safetensors_index import Index

PEAK_SECONDS = 0.3
MEET_STEPS = 16
"""Steps between meetings of replicas that else do not wait for all: so late may a stop be heard, and so far may one be
ahead. More would hear later; fewer would have the fast ones wait for every hiccup of a slow one."""

Tell = Callable[[RunEvent], None]
IsStopped = Callable[[], bool]


@dataclass(frozen=True)
class Ready:
    """A rank before its first step: how many were done before, and the bytes that it holds."""

    step: int
    parameter_bytes: int
    state_bytes: int


class Trainer:
    """Builds this rank's part of the model; then `prepare`, then `run`.

    `source` holds the weights to begin from, None for random ones. `beginning` is rank 0's, who alone reads the data
    and writes metrics and the finished model. `std` is that of random weights. `mirror` keeps steps in memory.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        groups: Groups,
        source: ByteSource | None = None,
        beginning: Beginning | None = None,
        std: float = STD,
        mirror: SnapshotReplicator | None = None,
    ) -> None:
        self.job, self.plan, self.spec, self.rank, self.groups = job, plan, spec, rank, groups
        self._source, self._beginning, self._std, self._mirror = source, beginning, std, mirror
        self._batches = None if beginning is None else beginning.batches(job)
        self._balance = load_balance(job, spec, groups)
        self._mesh = mesh_of(spec, plan, rank, groups.tp, plan.sequence, groups.ep, self._balance)
        spread = plan.zero == 3
        self._chunks = build_chunks(spec, self._mesh, plan.runs, torch_dtype(job.dtype), "meta" if spread else None)
        if spread:  # no rank ever holds all that it computes with
            for model in self._chunks:
                without_memory(model)
        self._ring = RingAttention(groups.cp) if plan.cp > 1 else None
        self._make_attend = recompute(plan.recompute, self._chunks, self._ring or TrainAttend)
        self._objective = NextToken(self._mesh)
        self._rates = rate_schedule(job)
        self._in_step = not (plan.servers and job.max_staleness)
        ahead = 1 if self._in_step else MEET_STEPS
        self._feed = BatchFeed(plan, groups.data, job.microbatch_size, self._batches, ahead, places=mirror is not None)
        self._schedules: dict[int, Schedule] = {}
        self._learner: Learner | None = None
        self._saves: AsyncSaves | None = None
        self._sinks: list[Sink] = []
        self._step = 0
        self._saved = -1
        self.computing = 0.0  # seconds of the last step's passes, what this stage waited for left out
        self._origin: Origin = "start"

    def prepare(self, progress: Progress | None = None) -> Ready:
        """Fill the model from the last step that memory or a save of the run holds, else from `source` or at random."""
        self._learner = learner_of(self.job, self.plan)(self.job, self.plan, self.rank, self.groups, self._chunks)
        found = self._mirror.find(self._learner.standing()) if self._mirror is not None else None
        folder, keep = Path(self.job.output_dir), self.job.save_total_limit
        copies = state_place(self.job, self.plan, self.rank)
        self._saves = AsyncSaves(folder, self.groups.save, keep, is_needed=found is None, place=copies)
        saved, place = self._saves.latest, b""
        if self._mirror is not None and found is not None and self._mirror.agree(found >= (saved or 0)):
            self._origin, place = "memory", self._mirror.restore(progress)
            self._went_on(found, msgspec.msgpack.decode(place))
            self._learner.recalled(found, self._rate(found - 1))
            self._saved = found if saved == found else -1
        elif saved is not None:
            self._origin = "save"
            opened = self._saves.restore(self._learner.blocks(), progress=progress)
            self._learner.restored(opened.step)
            self._went_on(opened.step, opened.facts["data"] if self._batches is not None else {})
            self._saved = opened.step
        else:
            self._learner.fill(self._filler(progress))
        if self._mirror is not None:
            self._mirror.begin(self._step, place)
        peak = matrix_peak(torch_dtype(self.job.dtype), PEAK_SECONDS)
        self._account = StepReport(self.groups, self.spec, self.plan.pp > 1, peak)
        return Ready(self._step, self._learner.weight_bytes, self._learner.state_bytes)

    def run(self, tell: Tell, is_stopped: IsStopped = lambda: False) -> None:
        """Take the steps that are left, or end after the one in which any rank is stopped; either way saved."""
        assert self._learner is not None, "prepare comes before run"
        if self._beginning is not None:
            self._sinks = sinks(Path(self.job.output_dir), self.job.report_to, self._step)
        tell(RunBegan(self._step, self._parameters(), self._account.peak, self.groups.network, self._origin))
        if self._origin == "memory" and self._is_due(self._step, self.job.save_steps):
            self._learner.settle(self._step, self._rate(self._step - 1))  # a copy is as it was before the save
            self._save()  # which is nothing new, unless a rank was lost before this save was whole
        if self._step < self.job.max_steps:
            self._feed.begin(self._step, self.job.max_steps)
        stop = False
        while self._step < self.job.max_steps and not stop:
            stop = self._take_step(tell, is_stopped())
        self._save()
        self._learner.end()
        if self._mirror is not None:
            self._mirror.settle()
        assert self._saves is not None
        self._tell_of(self._saves.wait(), tell)
        tell(RunEnded(self._step, self._finish()))

    def close(self) -> None:
        """End the threads of this rank, once its links are closed or the run has ended."""
        self._feed.close()
        if self._ring is not None:
            self._ring.close()
        if self._learner is not None:
            self._learner.close()
        if self._mirror is not None:
            self._mirror.close()
        if self._saves is not None:
            self._saves.close()
        for sink in self._sinks:
            sink.close()

    def _take_step(self, tell: Tell, stopped: bool) -> bool:
        """One step and its news; whether the run is to stop."""
        assert self._learner is not None and self._saves is not None
        start = time.monotonic()
        portion = self._feed.take()
        result = self._play(portion)
        rate = self._rate(self._step)
        self._step += 1
        mirror = self._mirror if is_copied(self.job, self._step) else None
        if mirror is not None:
            mirror.settle()
        norm = self._learner.learn(self._step, rate, result.loss_sum)
        balance = None if self._balance is None else self._balance.mean
        counted = RankCounters(portion, result, norm, rate, start, balance)
        saves = self._is_due(self._step, self.job.save_steps)
        if self._in_step or saves or self._step % MEET_STEPS == 0:
            record, stop = self._account.record(self._step, counted, stopped)
        else:
            record, stop = self._account.alone(self._step, counted), False
        for sink in self._sinks:  # before a save or copy of this step can be whole, so that none is ahead of its lines
            sink.write(record)
        if mirror is not None:
            mirror.take(self._step, portion.place)
        tell(RunStepped(record))
        if saves:
            self._save()
        self._tell_of(self._saves.finished(), tell)
        return stop

    def _play(self, portion: Portion) -> StepResult:
        """The forward and backward passes of this rank's part of a step."""
        assert self._learner is not None
        whole, cp = portion.read(), self.groups.cp
        scale = self._learner.begin(portion, whole)
        if self._balance is not None:
            self._balance.begin(portion.microbatches)
        microbatches = [cut_tokens(tokens, cp.rank, cp.size) for tokens in whole]
        if not microbatches:
            return StepResult(0.0, 0)
        begun = time.monotonic()
        result = play(
            self._schedule(len(microbatches)),
            self._mesh.stage,
            self._chunks,
            microbatches,
            self.groups.wires,
            self._objective,
            scale,
            self._make_attend,
        )
        self.computing = time.monotonic() - begun - result.waited
        return result

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._schedules:
            plan = self.plan
            self._schedules[microbatches] = build_schedule(
                plan.schedule, plan.pp, microbatches, depth=plan.depth, chunks=plan.chunks
            )
        return self._schedules[microbatches]

    def _filler(self, progress: Progress | None) -> Callable[[nn.Module], object]:
        """What gives a module's parameters their first values."""
        if self._source is None:
            return lambda module: fill_randomly(module.parameters(), self.spec, self.job.seed, self._std)
        source, dtype = checked(self._source), torch_dtype(self.job.dtype)
        index = Index.read(source)
        return lambda module: load(module, index, source, dtype, progress)

    def _save(self) -> None:
        """After the present step, in the background, unless it is saved already."""
        assert self._learner is not None
        if self._step == self._saved:
            return
        assert self._saves is not None
        facts = self._learner.settle(self._step, self._rate(self._step - 1))
        self._saved = self._step
        if self._batches is not None:
            facts |= {"data": self._batches.state(self._step), "plan": str(self.plan)}
        self._saves.save(self._step, self._learner.blocks(), facts)

    def _went_on(self, step: int, place: dict[str, Any]) -> None:
        """What is held is of this step, and the data goes on from that place."""
        self._step = step
        if self._batches is not None:
            self._batches.restore(place)

    def _is_due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps, and after the last, happens after this one."""
        return step > 0 and every > 0 and (step % every == 0 or step == self.job.max_steps)

    def _rate(self, step: int) -> float:
        return self.job.learning_rate * self._rates.factor(step)

    def _finish(self) -> str:
        """The finished model's folder, on rank 0 and when all steps are done."""
        if self._step < self.job.max_steps:
            return ""
        assert self._saves is not None
        opened = self._saves.open_model(is_here=self._beginning is not None)
        if self._beginning is None:
            return ""
        run = Path(self.job.output_dir)
        return str(write_final(opened, run, self._beginning.config, self._beginning.companions))

    def _parameters(self) -> int:
        return sum(math.prod(shape) for shape in shapes_of(self.spec).values())

    def _tell_of(self, saves: list[SaveResult], tell: Tell) -> None:
        for one in saves:
            tell(RunSaved(one.step, one.seconds, one.nbytes, one.error))


def load_balance(job: Job, spec: ModelSpec, groups: Groups) -> LoadBalance | None:
    """What evens out the experts' load, if the job asks for it."""
    if not job.router_aux_loss_coef:
        return None
    layers = sum(layer.moe is not None for layer in spec.layers)
    return LoadBalance(job.router_aux_loss_coef, layers, groups.tp, groups.cp)
