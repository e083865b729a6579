"""`DiLoCo`: replicas train on their own for some steps, then agree on one set of weights (DiLoCo, 2311.08105).

Each replica r takes H steps of the inner optimizer from the anchor w with gradients of its own tokens, t_r of them, and
comes to w_r. Then all take one step of gradient descent with Nesterov momentum from the anchor:

    delta = sum_r t_r / t (w - w_r)      v = momentum v + delta      w = w - rate (delta + momentum v)

One sum is sent in H steps. With H = 1, rate 1, momentum 0 and plain descent inside, it is data parallelism.
`DiLoCoLearner` does this as a `Learner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tllm.comm.collectives.group import solo
from tllm.core.errors import PlanError
from tllm.parallel.replicated import ReplicatedParameters
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.gradient_clipping import GradientNorm
from tllm.training.gradients.reduction import Exact, GradientGroups, Reduction
from tllm.training.optim.optimizer import SGD, optimizer_of
from tllm.training.optim.sharded_update import FLOAT32_WEIGHTS, OptimizerUpdate
from tllm.training.state.replica_local import TAKEN, replica_local_state
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock, optimizer_blocks, update_dtype
from tllm.training.state.train_state import TrainState
from tllm.training.step.model_chunks import parameters_of
from tllm.training.step.rank_groups import RankConfig
from tllm.training.sync.learner import reduction_of, state_place

OUTER_MOMENTUM = "outer_momentum"
"""The state's name of v."""
TOKENS = "tokens"
"""The name of t_r."""


class DiLoCo:
    """The outer step over `groups`. `update` is the inner one: its buckets are summed within a replica only.

    Between outer steps replicas differ, so a run saves and ends right after one, which may come early (`is_due` says
    when it is time). Then the anchor is the weights, and v is the same on every rank. Weights are those that the
    optimizer updates: the float32 ones of 16-bit weights.
    """

    def __init__(
        self,
        update: OptimizerUpdate,
        groups: GradientGroups,
        local_steps: int,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        reduction: Reduction | None = None,
    ) -> None:
        if update.buckets.layout.zero or any(bucket.spread for bucket in update.buckets.layout.buckets):
            raise PlanError(
                "with local_steps replicas hold weights of their own, and zero or ep would have them share theirs",
                "leave out zero and ep, or local_steps",
            )
        self.update, self.dp = update, groups.dp
        self.local_steps, self.outer_learning_rate = local_steps, outer_learning_rate
        self.outer = SGD(outer_momentum, nesterov=True)
        self.reduction = reduction or Exact()
        self.anchors = [torch.empty_like(mine, dtype=update_dtype(mine.dtype)) for mine in update.flat.mine]
        self.velocities = [torch.zeros_like(anchor) for anchor in self.anchors]
        self._tokens = 0
        self._counted = torch.ones(1, dtype=torch.int64)  # tokens by which this rank counted in the last mean
        self.take_weights()

    def take_weights(self) -> None:
        """Begin from the weights as they are now, after they were filled."""
        for number, anchor in enumerate(self.anchors):
            with self.update.states[number] as state:
                anchor.copy_(state.get(FLOAT32_WEIGHTS, self.update.flat.mine[number]))

    def count_step(self, tokens: int) -> None:
        """Count an inner step on so many predicted tokens, by which this rank's weights count in the next mean."""
        self._tokens += tokens

    def is_due(self, step: int) -> bool:
        """Whether the outer step comes after this one, counted from 1."""
        return step % self.local_steps == 0

    def outer_step(self) -> None:
        """The outer step. Every rank ends with the same weights to the bit."""
        self._counted.fill_(self._tokens)
        self._tokens, part = 0, self._part()
        for number, (anchor, velocity) in enumerate(zip(self.anchors, self.velocities, strict=True)):
            mine = self.update.flat.mine[number]
            with self.update.states[number] as state:
                own = state.get(FLOAT32_WEIGHTS, mine)
                delta = self.reduction.all_reduce(number, anchor.sub(own).mul_(part), self.dp)
                self.outer.update(anchor, delta, {"momentum_buffer": velocity}, 1, self.outer_learning_rate, 0.0)
                own.copy_(anchor)
            mine.copy_(anchor)

    def average_inner_states(self) -> None:
        """Before a save: every replica takes the mean of the inner optimizers' states, by tokens as the weights.

        Then any number of replicas can go on from it, and to go on is to go on as if nothing was saved.
        """
        part = self._part()
        for kept in self.update.states:
            with kept as state:
                for name in self.update.optimizer.states:
                    self.dp.all_reduce(state[name].mul_(part))

    def checkpoint_slices(self) -> Iterator[StateSlice]:
        """What a save keeps beside weights and inner states: v, the same on every rank of dp. Views."""
        for number, velocity in enumerate(self.velocities):
            for parameter, start, place in self.update.buckets.layout.spans(number):
                yield StateSlice(parameter, OUTER_MOMENTUM, start, velocity[place])

    def train_state_blocks(self) -> list[TensorBlock]:
        """Views of the weights, v, and of this replica alone its inner states and tokens: right after an outer step."""
        replica = self.dp.rank, self.dp.size
        named = {name: replica_local_state(name, TAKEN, *replica) for name in self.update.optimizer.states}
        inner = [held._replace(name=named.get(held.name, held.name)) for held in self.update.state_slices()]
        counted = TensorBlock(f"{replica_local_state(TOKENS, TAKEN, *replica)}/{TOKENS}", ((0, 1),), self._counted)
        return [*self.update.flat.blocks(), *optimizer_blocks([*inner, *self.checkpoint_slices()]), counted]

    @property
    def nbytes(self) -> int:
        """Memory of the anchor and of v."""
        return sum(tensor.nbytes for tensor in self.anchors + self.velocities)

    def _part(self) -> float:
        """t_r / t of the last outer step; an even share where no replica had a token to learn."""
        total = int(self.dp.all_reduce(self._counted.clone()).item())
        return self._counted.item() / total if total else 1 / self.dp.size


class DiLoCoLearner:
    """Gradients are those of a replica's own tokens; its weights are averaged with others' once in `local_steps`.

    Norms are of this replica. A save comes after an outer step, which is taken early where it is not due.
    """

    def __init__(self, config: RankConfig, trained: Sequence[nn.Module]) -> None:
        job, groups = config.job, config.groups
        self._max_grad_norm = job.max_grad_norm
        parameters = parameters_of(trained)
        layout = BucketLayout(parameters, GradientGroups(solo()))
        self._buckets = GradientBuckets(layout, ReplicatedParameters(parameters, groups.replica))
        self._update = OptimizerUpdate(self._buckets, optimizer_of(job), job.weight_decay, state_place(config))
        self._norm = GradientNorm(self._buckets, config.rank)
        everyone = GradientGroups(groups.dp)
        self._reduction = reduction_of(job, self._buckets, everyone)
        outer = (job.local_steps, job.outer_learning_rate, job.outer_momentum)
        self._outer = DiLoCo(self._update, everyone, *outer, self._reduction)
        self._tokens = 0
        self._weights_agree = self._states_averaged = True

    def begin_step(self, batch: ReplicaBatch, microbatches: Sequence[Tokens]) -> float:
        self._buckets.begin(len(microbatches))
        self._tokens = sum(microbatch.predicted for microbatch in microbatches)
        return 1 / max(self._tokens, 1)

    def apply_gradients(self, step: int, learning_rate: float, loss_sum: float) -> float:
        self._buckets.finish()
        norm = self._norm.clip(self._max_grad_norm, loss_sum)
        self._norm.check(step, norm, loss_sum, self._update.flat.blocks)
        self._update.apply(step, learning_rate)
        self._outer.count_step(self._tokens)
        self._weights_agree = self._states_averaged = False
        if self._outer.is_due(step):
            self._agree()
        return norm

    def prepare_checkpoint(self, step: int, learning_rate: float) -> dict[str, Any]:
        if not self._weights_agree:
            self._agree()
        if not self._states_averaged:
            self._outer.average_inner_states()
        self._states_averaged = True
        self._reduction.consolidate()
        return {}

    def initialize(self, fill: Callable[[nn.Module], object]) -> None:
        self._update.fill(fill)
        self._outer.take_weights()

    def checkpoint_restored(self, step: int) -> None:
        self._outer.take_weights()

    def train_state(self) -> TrainState:
        return TrainState(
            self._outer.train_state_blocks(),
            optimizer_blocks(self._reduction.replica_slices()),
            list(self._reduction.layout_bound_blocks()),
        )

    def snapshot_restored(self, step: int, learning_rate: float) -> None:
        self._outer.take_weights()
        self._states_averaged = False

    def finish(self) -> None:
        """Nobody waits for this rank."""

    def checkpoint_blocks(self) -> list[TensorBlock]:
        return self._update.blocks() + optimizer_blocks(
            [*self._outer.checkpoint_slices(), *self._reduction.checkpoint_slices()]
        )

    @property
    def weight_bytes(self) -> int:
        return self._update.flat.nbytes

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes + self._update.nbytes + self._outer.nbytes + self._reduction.nbytes

    def close(self) -> None:
        self._buckets.close()
        self._update.close()

    def _agree(self) -> None:
        self._outer.outer_step()
        self._weights_agree = True
