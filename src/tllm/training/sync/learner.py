"""`Learner`: turns a step's gradients into the next weights. `SynchronousLearner` is the usual one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tllm.devices.choose import CPU
from tllm.parallel.replicated import ReplicatedParameters
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.bucket_layout import BUCKET_BYTES, BUCKET_BYTES_OF_GPU, BucketLayout
from tllm.training.gradients.compressed_reduction import Bf16Reduction, Int8Reduction
from tllm.training.gradients.delayed_reduction import DelayedReduction
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.gradient_clipping import GradientNorm
from tllm.training.gradients.powersgd import PowerSGD
from tllm.training.gradients.reduction import Exact, GradientGroups, Reduction
from tllm.training.job.job import Job
from tllm.training.optim.optimizer import optimizer_of
from tllm.training.optim.sharded_update import OptimizerUpdate
from tllm.training.optim.zero3 import Zero3Gathering, unit_numbers, units_of
from tllm.training.state.optimizer_offload import OnDevice, OnDisk, OnHost, StatePlacement
from tllm.training.state.tensor_blocks import TensorBlock, optimizer_blocks
from tllm.training.state.train_state import FlatMemory, TrainState
from tllm.training.step.model_chunks import parameters_of
from tllm.training.step.rank_groups import RankConfig

OFFLOADED = "offload"


class LearnerState(Protocol):
    """What a rank keeps between two steps, as the saves and snapshots of a run see it. Every rank calls alike."""

    def initialize(self, fill: Callable[[nn.Module], object]) -> None:
        """Start from the weights that `fill` gives to the parameters of one module after another, without any state."""

    def prepare_checkpoint(self, step: int, learning_rate: float) -> dict[str, Any]:
        """Before a save after step `step`: apply to the weights what is still outstanding (delayed or local updates).

        Returns the facts that the save keeps beside the blocks. To call it twice is to call it once.
        """

    def checkpoint_blocks(self) -> list[TensorBlock]:
        """All that this rank must save, as views: filling them restores it. Valid after `prepare_checkpoint`."""

    def checkpoint_restored(self, step: int) -> None:
        """The checkpoint blocks were filled from the save of this step."""

    def train_state(self) -> TrainState:
        """All that this rank holds between two steps, as it is, to copy into a snapshot in memory."""

    def snapshot_restored(self, step: int, learning_rate: float) -> None:
        """The train state was filled from snapshots of this step, which was taken at this learning rate."""

    @property
    def weight_bytes(self) -> int:
        """Memory of this rank's part of the model between two steps."""

    @property
    def state_bytes(self) -> int:
        """Memory of gradients and of all that is kept beside the model's weights."""


class Learner(LearnerState, Protocol):
    """Turns the gradients of each step's microbatches into the next weights.

    Between `begin_step` and `apply_gradients` the step's forward and backward passes run.
    """

    def begin_step(self, batch: ReplicaBatch, microbatches: Sequence[Tokens]) -> float:
        """Expect the gradients of this replica's `microbatches`; returns what their losses are to be multiplied by."""

    def apply_gradients(self, step: int, learning_rate: float, loss_sum: float) -> float:
        """Sum, clip and apply the gradients of step `step`, counted from 1; the norm of the gradient before clipping.

        `loss_sum` is of this rank's microbatches. NonFiniteError, on every rank, where a loss or a norm is not finite.
        """

    def finish(self) -> None:
        """No further step and no further save comes."""

    def close(self) -> None:
        """End the threads of this learner."""


class SynchronousLearner:
    """Every replica sees the same weights at every step: gradients are summed over dp, as the plan's `zero` says."""

    def __init__(self, config: RankConfig, trained: Sequence[nn.Module], kept: FlatMemory | None = None) -> None:
        job, plan, groups = config.job, config.plan, config.groups
        self._max_grad_norm = job.max_grad_norm
        # What a device or a disk holds the next part needs.
        self._stays = config.device == CPU and plan.offload == "none"
        parameters = parameters_of(trained)
        units = units_of(trained)
        layout = BucketLayout(
            parameters,
            GradientGroups(groups.dp) if job.delay_steps else GradientGroups(groups.dp, groups.edp, groups.ep),
            plan.zero,
            bucket_bytes(config),
            units=unit_numbers(units, parameters) if plan.zero == 3 else None,
        )
        replicas = ReplicatedParameters(parameters, groups.replica)
        self._buckets = GradientBuckets(layout, replicas, deterministic=job.deterministic)
        reduction = reduction_of(job, self._buckets)
        # Without experts spread over replicas the ranks of edp are those of dp, by links that nothing else uses then.
        self._delayed = (
            DelayedReduction(self._buckets, reduction, GradientGroups(groups.edp)) if job.delay_steps else None
        )
        self._is_alone = groups.dp.size == 1  # then nothing is delayed
        self._is_outstanding = False  # whether the last step's gradients are still to be applied
        self._buckets.reduction = self._delayed or reduction
        self._update = OptimizerUpdate(self._buckets, optimizer_of(job), job.weight_decay, state_place(config), kept)
        self._gathering = Zero3Gathering(units, self._update.flat, self._buckets)
        self._norm = GradientNorm(self._buckets, config.rank, job.deterministic)

    def begin_step(self, batch: ReplicaBatch, microbatches: Sequence[Tokens]) -> float:
        self._buckets.begin(len(microbatches))
        self._gathering.begin(len(microbatches))
        return 1 / (batch.denominator or 1.0)  # nothing may be worth learning, as where all completions are cut off

    def apply_gradients(self, step: int, learning_rate: float, loss_sum: float) -> float:
        self._buckets.finish()
        self._gathering.finish()
        if self._delayed is None or self._is_alone:
            return self._update_weights(step, learning_rate, loss_sum)
        late, self._is_outstanding = int(self._is_outstanding), True
        return self._update_weights(step, learning_rate, loss_sum, late) if late else self._clip(step, loss_sum)

    def prepare_checkpoint(self, step: int, learning_rate: float) -> dict[str, Any]:
        if self._delayed is not None and self._is_outstanding:
            self._delayed.drain()
            self._update_weights(step, learning_rate, 0.0)
            self._is_outstanding = False
        self._buckets.reduction.consolidate()
        return {}

    def initialize(self, fill: Callable[[nn.Module], object]) -> None:
        self._update.fill(fill)

    def checkpoint_restored(self, step: int) -> None:
        """Nothing is kept but what the blocks are views of."""

    def train_state(self) -> TrainState:
        reduction, moved = self._buckets.reduction, self._update.blocks()
        kept, bound = optimizer_blocks(reduction.replica_slices()), list(reduction.layout_bound_blocks())
        if self._delayed is None:
            stays = self._stays and not kept and not bound
            return TrainState(moved, kept, bound, memory=self._update.memory if stays else None)
        return TrainState(moved, [*self._delayed.sums(), *kept], bound, self._delayed.when_ready)

    def snapshot_restored(self, step: int, learning_rate: float) -> None:
        if self._delayed is None or not self._delayed.on_the_way:
            return
        self._delayed.snapshot_restored()
        self._is_outstanding = True
        if self._is_alone:  # a rank alone delays nothing: what was outstanding is applied now, as before a save
            self.prepare_checkpoint(step, learning_rate)

    def finish(self) -> None:
        """Nobody waits for this rank."""

    def checkpoint_blocks(self) -> list[TensorBlock]:
        return self._update.blocks() + optimizer_blocks(self._buckets.reduction.checkpoint_slices())

    @property
    def weight_bytes(self) -> int:
        return self._update.flat.nbytes

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes + self._update.nbytes + self._buckets.reduction.nbytes

    def close(self) -> None:
        if self._delayed is not None:
            self._delayed.close()
        self._buckets.close()
        self._update.close()

    def _update_weights(self, step: int, learning_rate: float, loss_sum: float, late: int = 0) -> float:
        """Clip the gradient of `late` steps before, which the buckets hold, and update the weights; the norm before."""
        norm = self._clip(step, loss_sum, late)
        self._update.apply(step - late, learning_rate)
        return norm

    def _clip(self, step: int, loss_sum: float, late: int = 0) -> float:
        norm = self._norm.clip(self._max_grad_norm, loss_sum)
        self._norm.check(step, norm, loss_sum, self._update.flat.blocks, late=late)
        return norm


def bucket_bytes(config: RankConfig) -> int:
    """Bytes of a bucket. A rank alone on a GPU sends none, and each is some launches for it."""
    is_alone = config.groups.dp.size == 1 and config.plan.offload == "none"
    return BUCKET_BYTES_OF_GPU if is_alone and config.device.type == "cuda" else BUCKET_BYTES


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


def state_place(config: RankConfig) -> StatePlacement:
    """Where the optimizer's states lie, as the plan's `offload` says."""
    if config.plan.offload == "disk":
        return OnDisk(Path(config.job.output_dir) / OFFLOADED / f"rank-{config.rank}")
    return OnHost() if config.plan.offload == "host" else OnDevice()
