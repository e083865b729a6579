"""`Learner`: what turns the gradients of a rank's microbatches into the next weights, and the state that this keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tllm.model.transformer import Transformer
from tllm.parallel.replicated import ReplicatedParameters
from tllm.spec.plan import Plan
from tllm.train.data.batch_feed import Portion
from tllm.train.data.batch_tensors import Tokens
from tllm.train.gradients.compressed_reduction import Bf16Reduction, Int8Reduction
from tllm.train.gradients.delayed_reduction import DelayedReduction
from tllm.train.gradients.gradient_buckets import GradientBuckets
from tllm.train.gradients.gradient_clipping import GradientNorm
from tllm.train.gradients.powersgd import PowerSGD
from tllm.train.gradients.reduction import Exact, GradientGroups, Reduction
from tllm.train.job.job import Job
from tllm.train.optim.optimizer import optimizer_of
from tllm.train.optim.sharded_update import OptimizerUpdate
from tllm.train.optim.zero3 import Zero3Gathering, unit_numbers, units_of
from tllm.train.state.optimizer_offload import OnDevice, OnDisk, OnHost, StatePlacement
from tllm.train.state.tensor_blocks import TensorBlock, optimizer_blocks
from tllm.train.state.train_state import TrainState
from tllm.train.step.model_chunks import parameters_of
from tllm.train.step.rank_groups import Groups

OFFLOADED = "offload"


class Learner(Protocol):
    """Between `begin` and `learn` the microbatches of one step are played, their losses times what `begin` returned."""

    def begin(self, portion: Portion, microbatches: Sequence[Tokens]) -> float:
        """Make ready for this replica's `microbatches`, whole ones, of the step's `portion`."""

    def learn(self, step: int, rate: float, loss: float) -> float:
        """The weights after step `step`, counted from 1; returns the norm of the gradient before it was clipped.

        `loss` is what this rank's microbatches came to. NonFiniteError, on every rank, where there is no number.
        """

    def settle(self, step: int, rate: float) -> dict[str, Any]:
        """Before a save after step `step`: bring to the weights what is still on its way to them.

        Returns what the save is to know beside blocks. Done twice it is as done once.
        """

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        """Begin from values that `fill` gives to the parameters of one module after another, without any state."""

    def blocks(self) -> list[TensorBlock]:
        """All that this rank must save; views, so that filling them fills their owners."""

    def restored(self, step: int) -> None:
        """The blocks were filled from the save of this step."""

    def standing(self) -> TrainState:
        """All that this rank must have to go on from a step as if nothing had been."""

    def recalled(self, step: int, rate: float) -> None:
        """What is `standing` was filled from copies of this step, whose rate was `rate`; every rank calls it."""

    def end(self) -> None:
        """No step and no save comes any more."""

    @property
    def weight_bytes(self) -> int:
        """Memory of this rank's part of the model between two steps."""

    @property
    def state_bytes(self) -> int:
        """Memory of gradients and of all that is kept beside the model's weights."""

    def close(self) -> None: ...


class SynchronousLearner:
    """Every replica sees the same weights at every step: gradients are summed over dp, as the plan's `zero` says."""

    def __init__(self, job: Job, plan: Plan, rank: int, groups: Groups, chunks: Sequence[Transformer]) -> None:
        self._limit = job.max_grad_norm
        parameters, units = parameters_of(chunks), units_of(chunks)
        self._buckets = GradientBuckets(
            parameters,
            GradientGroups(groups.dp) if job.delay_steps else GradientGroups(groups.dp, groups.edp, groups.ep),
            ReplicatedParameters(parameters, groups.replica),
            plan.zero,
            units=unit_numbers(units, parameters) if plan.zero == 3 else None,
            deterministic=job.deterministic,
        )
        reduction = reduction_of(job, self._buckets)
        # Without experts spread over replicas the ranks of edp are those of dp, by links that nothing else uses then.
        self._late = DelayedReduction(self._buckets, reduction, GradientGroups(groups.edp)) if job.delay_steps else None
        self._is_alone = groups.dp.size == 1  # and waits for no sum
        self._is_waiting = False  # whether a step's gradients are still to be applied
        self._buckets.reduction = self._late or reduction
        self._update = OptimizerUpdate(self._buckets, optimizer_of(job), job.weight_decay, state_place(job, plan, rank))
        self._gathering = Zero3Gathering(units, self._update.runs)
        self._norm = GradientNorm(self._buckets, rank, job.deterministic)

    def begin(self, portion: Portion, microbatches: Sequence[Tokens]) -> float:
        self._buckets.begin(len(microbatches))
        self._gathering.begin(len(microbatches))
        return 1 / portion.predicted

    def learn(self, step: int, rate: float, loss: float) -> float:
        self._buckets.finish()
        self._gathering.finish()
        if self._late is None or self._is_alone:
            return self._move(step, rate, loss)
        waited, self._is_waiting = self._is_waiting, True
        return self._move(step - 1, rate, loss) if waited else self._clip(step, loss)

    def settle(self, step: int, rate: float) -> dict[str, Any]:
        if self._late is not None and self._is_waiting:
            self._late.drain()
            self._move(step, rate, 0.0)
            self._is_waiting = False
        self._buckets.reduction.settle()
        return {}

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        self._update.fill(fill)

    def restored(self, step: int) -> None:
        """Nothing is kept but what the blocks are views of."""

    def standing(self) -> TrainState:
        reduction, moved = self._buckets.reduction, self._update.blocks()
        kept, bound = optimizer_blocks(reduction.own()), list(reduction.bound())
        if self._late is None:
            return TrainState(moved, kept, bound)
        return TrainState(moved, [*self._late.sums(), *kept], bound, self._late.later)

    def recalled(self, step: int, rate: float) -> None:
        if self._late is None or not self._late.on_the_way:
            return
        self._late.recalled()
        self._is_waiting = True
        if self._is_alone:  # no step comes to take what is on its way: it is applied as for a save
            self.settle(step, rate)

    def end(self) -> None:
        """Nobody waits for this rank."""

    def blocks(self) -> list[TensorBlock]:
        return self._update.blocks() + optimizer_blocks(self._buckets.reduction.held())

    @property
    def weight_bytes(self) -> int:
        return self._update.runs.nbytes

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes + self._update.nbytes + self._buckets.reduction.nbytes

    def close(self) -> None:
        if self._late is not None:
            self._late.close()
        self._buckets.close()
        self._update.close()

    def _move(self, step: int, rate: float, loss: float) -> float:
        """Clip what the buckets hold, the gradient of step `step`, and let the weights follow it."""
        norm = self._clip(step, loss)
        self._update.apply(step, rate)
        return norm

    def _clip(self, step: int, loss: float) -> float:
        norm = self._norm.clip(self._limit, loss) if self._limit else self._norm.norm(loss)
        self._norm.check(step, norm, loss, self._update.runs.blocks)
        return norm


def reduction_of(job: Job, buckets: GradientBuckets, groups: GradientGroups | None = None) -> Reduction:
    """What `gradient_compression` asks for, over other groups than the buckets' own if these are given."""
    match job.gradient_compression:
        case "bf16":
            return Bf16Reduction()
        case "int8":
            return Int8Reduction(buckets, groups)
        case "powersgd":
            return PowerSGD(buckets, job.powersgd_rank, groups)
    return Exact()


def state_place(job: Job, plan: Plan, rank: int) -> StatePlacement:
    """Where the optimizer's states lie."""
    if plan.offload == "disk":
        return OnDisk(Path(job.output_dir) / OFFLOADED / f"rank-{rank}")
    return OnHost() if plan.offload == "host" else OnDevice()
