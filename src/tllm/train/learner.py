"""`Learner`: what turns the gradients of a rank's microbatches into the next weights, and the state that this keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tllm.model.transformer import Transformer
from tllm.parallel.replicas import Replicas
from tllm.spec.plan import Plan
from tllm.train.blocks import Block, model_blocks, optimizer_blocks
from tllm.train.chunks import parameters_of
from tllm.train.feed import Portion
from tllm.train.gradients import Buckets
from tllm.train.groups import Groups
from tllm.train.job import Job
from tllm.train.job_parts import optimizer_of
from tllm.train.norm import MeshNorm
from tllm.train.reduction import GradientGroups
from tllm.train.zero import Update


class Learner(Protocol):
    """Between `begin` and `learn` the microbatches of one step are played, their losses times what `begin` returned."""

    def begin(self, portion: Portion) -> float: ...

    def learn(self, step: int, rate: float) -> float:
        """The weights after step `step`, counted from 1; returns the norm of the gradient before it was clipped."""

    def blocks(self) -> list[Block]:
        """All that this rank must save; views, so that filling them fills their owners."""

    def take_weights(self) -> None:
        """Begin from the model's weights as they are now, without any state."""

    @property
    def state_bytes(self) -> int:
        """Memory of gradients and of all that is kept beside the model's weights."""

    def close(self) -> None: ...


class Synchronous:
    """Every replica sees the same weights at every step: gradients are summed over dp, as the plan's `zero` says."""

    def __init__(self, job: Job, plan: Plan, groups: Groups, chunks: Sequence[Transformer]) -> None:
        self._chunks = chunks
        self._limit = job.max_grad_norm
        parameters = parameters_of(chunks)
        summed = GradientGroups(groups.dp, groups.edp, groups.ep)
        self._buckets = Buckets(parameters, summed, Replicas(parameters, groups.replica), plan.zero)
        self._update = Update(self._buckets, optimizer_of(job), job.weight_decay)
        self._norm = MeshNorm(self._buckets)

    def begin(self, portion: Portion) -> float:
        self._buckets.begin(len(portion.rows))
        return 1 / portion.predicted

    def learn(self, step: int, rate: float) -> float:
        self._buckets.finish()
        norm = self._norm.clip(self._limit) if self._limit else self._norm.norm()
        self._update.apply(step, rate)
        return norm

    def blocks(self) -> list[Block]:
        weights = [block for model in self._chunks for block in model_blocks(model)]
        return weights + optimizer_blocks(self._update.held())

    def take_weights(self) -> None:
        self._update.take_weights()

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes + self._update.nbytes

    def close(self) -> None:
        self._buckets.close()
