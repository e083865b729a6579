"""`Local`: replicas that learn on their own for some steps and then agree (`train.outer`), as a `Learner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tllm.comm.group import solo
from tllm.model.transformer import Transformer
from tllm.parallel.replicas import Replicas
from tllm.spec.plan import Plan
from tllm.train.blocks import Block, optimizer_blocks
from tllm.train.chunks import parameters_of
from tllm.train.feed import Portion
from tllm.train.gradients import Buckets
from tllm.train.groups import Groups
from tllm.train.job import Job
from tllm.train.learner import reduction_of, state_place
from tllm.train.norm import MeshNorm
from tllm.train.optimizer import optimizer_of
from tllm.train.outer import LocalSteps
from tllm.train.reduction import GradientGroups
from tllm.train.standing import Standing
from tllm.train.tensors import Tokens
from tllm.train.zero import Update


class Local:
    """Gradients are those of a replica's own tokens; its weights are averaged with others' once in `local_steps`.

    Norms are of this replica. A save comes after an outer step, which is taken early where it is not due.
    """

    def __init__(self, job: Job, plan: Plan, rank: int, groups: Groups, chunks: Sequence[Transformer]) -> None:
        self._limit = job.max_grad_norm
        parameters = parameters_of(chunks)
        self._buckets = Buckets(parameters, GradientGroups(solo()), Replicas(parameters, groups.replica))
        self._update = Update(self._buckets, optimizer_of(job), job.weight_decay, state_place(job, plan, rank))
        self._norm = MeshNorm(self._buckets, rank)
        everyone = GradientGroups(groups.dp)
        self._reduction = reduction_of(job, self._buckets, everyone)
        outer = (job.local_steps, job.outer_learning_rate, job.outer_momentum)
        self._outer = LocalSteps(self._update, everyone, *outer, self._reduction)
        self._tokens = 0
        self._agreed = self._settled = True

    def begin(self, portion: Portion, microbatches: Sequence[Tokens]) -> float:
        self._buckets.begin(len(microbatches))
        self._tokens = sum(microbatch.predicted for microbatch in microbatches)
        return 1 / max(self._tokens, 1)

    def learn(self, step: int, rate: float, loss: float) -> float:
        self._buckets.finish()
        norm = self._norm.clip(self._limit, loss) if self._limit else self._norm.norm(loss)
        self._norm.check(step, norm, loss, self._update.runs.blocks)
        self._update.apply(step, rate)
        self._outer.learned(self._tokens)
        self._agreed = self._settled = False
        if self._outer.is_due(step):
            self._agree()
        return norm

    def settle(self, step: int, rate: float) -> dict[str, Any]:
        if not self._agreed:
            self._agree()
        if not self._settled:
            self._outer.settle()
        self._settled = True
        self._reduction.settle()
        return {}

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        self._update.fill(fill)
        self._outer.take_weights()

    def restored(self, step: int) -> None:
        self._outer.take_weights()

    def standing(self) -> Standing:
        return Standing(self._outer.standing(), optimizer_blocks(self._reduction.own()), list(self._reduction.bound()))

    def recalled(self, step: int, rate: float) -> None:
        self._outer.take_weights()
        self._settled = False

    def end(self) -> None:
        """Nobody waits for this rank."""

    def blocks(self) -> list[Block]:
        return self._update.blocks() + optimizer_blocks([*self._outer.held(), *self._reduction.held()])

    @property
    def weight_bytes(self) -> int:
        return self._update.runs.nbytes

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes + self._update.nbytes + self._outer.nbytes + self._reduction.nbytes

    def close(self) -> None:
        self._buckets.close()
        self._update.close()

    def _agree(self) -> None:
        self._outer.agree()
        self._agreed = True
