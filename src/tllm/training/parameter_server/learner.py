"""`ParameterServerLearner`: a `Learner` whose weights and optimizer states are on parameter servers
(`training.parameter_server.client`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tllm.comm.collectives.group import solo
from tllm.model.transformer import Transformer
from tllm.parallel.replicated import ReplicatedParameters
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.parameter_server.client import ParameterServerClient
from tllm.training.parameter_server.connections import lines_of
from tllm.training.parameter_server.segments import row_table
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.state.train_state import TrainState
from tllm.training.step.model_chunks import parameters_of
from tllm.training.step.rank_groups import RankConfig


class ParameterServerLearner:
    """Pulls the weights of each step and pushes its gradient. Nothing here outlives a step, so saves are the servers'.

    With `max_staleness` 0 the run is that of replicas that sum their gradients themselves; else norms are of this
    replica, and its loss is the mean over its own tokens.
    """

    def __init__(self, config: RankConfig, trained: Sequence[nn.Module]) -> None:
        job, groups = config.job, config.groups
        parameters = parameters_of(trained)
        layout = BucketLayout(parameters, GradientGroups(solo()))
        self._buckets = GradientBuckets(layout, ReplicatedParameters(parameters, solo()))
        chunk = trained[0]
        assert isinstance(chunk, Transformer), "adapters are not trained on servers"
        table, lines = row_table(chunk, parameters), lines_of(groups.to, groups.back)
        limits = (job.max_staleness, job.max_grad_norm)
        self._client = ParameterServerClient(self._buckets, table, lines, *limits, groups.world)
        self._is_first = config.rank == 0
        self._has_to_give = False

    def begin_step(self, batch: ReplicaBatch, microbatches: Sequence[Tokens]) -> float:
        if self._has_to_give:  # not before: servers listen when every rank is ready to take its first step
            self._client.give()
            self._has_to_give = False
        self._client.begin(microbatches)
        self._buckets.begin(len(microbatches))
        return self._client.scale(sum(microbatch.predicted for microbatch in microbatches), batch.predicted)

    def apply_gradients(self, step: int, learning_rate: float, loss_sum: float) -> float:
        self._buckets.finish()
        return self._client.apply(step, learning_rate, loss_sum)

    def prepare_checkpoint(self, step: int, learning_rate: float) -> dict[str, Any]:
        """Servers have every replica's steps then, and save them; the optimizer counts by `updates`."""
        return {"updates": self._client.save()}

    def initialize(self, fill: Callable[[nn.Module], object]) -> None:
        """Rank 0's values are the run's; the others pull them."""
        self._has_to_give = self._is_first
        if self._is_first:
            self._client.flat.fill(fill)
        else:
            self._clear()

    def checkpoint_restored(self, step: int) -> None:
        self._client.step = step
        self._clear()

    def train_state(self) -> TrainState:
        return TrainState()

    def snapshot_restored(self, step: int, learning_rate: float) -> None:
        self.checkpoint_restored(step)

    def finish(self) -> None:
        self._client.close()

    def checkpoint_blocks(self) -> list[TensorBlock]:
        return []

    @property
    def weight_bytes(self) -> int:
        return self._client.flat.nbytes

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes

    def close(self) -> None:
        self._buckets.close()

    def _clear(self) -> None:
        """Numbers where nothing was pulled yet: rows of the table that no token has had."""
        for run in self._client.flat.whole:
            run.zero_()
