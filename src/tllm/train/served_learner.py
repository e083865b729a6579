"""`Served`: a replica whose weights and optimizer's state lie on servers (`train.served`), as a `Learner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tllm.comm.group import solo
from tllm.model.transformer import Transformer
from tllm.parallel.replicas import Replicas
from tllm.spec.plan import Plan
from tllm.train.blocks import Block
from tllm.train.chunks import parameters_of
from tllm.train.feed import Portion
from tllm.train.gradients import Buckets
from tllm.train.groups import Groups
from tllm.train.job import Job
from tllm.train.reduction import GradientGroups
from tllm.train.served import ServedUpdate
from tllm.train.server_cut import row_table
from tllm.train.server_rank import lines_of
from tllm.train.standing import Standing
from tllm.train.tensors import Tokens


class Served:
    """Pulls the weights of each step and pushes its gradient. Nothing here outlives a step, so saves are the servers'.

    With `max_staleness` 0 the run is that of replicas that sum their gradients themselves; else norms are of this
    replica, and its loss is the mean over its own tokens.
    """

    def __init__(self, job: Job, plan: Plan, rank: int, groups: Groups, chunks: Sequence[Transformer]) -> None:
        parameters = parameters_of(chunks)
        self._buckets = Buckets(parameters, GradientGroups(solo()), Replicas(parameters, solo()))
        table, lines = row_table(chunks[0], parameters), lines_of(groups.to, groups.back)
        limits = (job.max_staleness, job.max_grad_norm)
        self._update = ServedUpdate(self._buckets, table, lines, *limits, groups.world)
        self._is_first = rank == 0
        self._has_to_give = False

    def begin(self, portion: Portion, microbatches: Sequence[Tokens]) -> float:
        if self._has_to_give:  # not before: servers listen when every rank is ready to take its first step
            self._update.give()
            self._has_to_give = False
        self._update.begin(microbatches)
        self._buckets.begin(len(microbatches))
        return self._update.scale(sum(microbatch.predicted for microbatch in microbatches), portion.predicted)

    def learn(self, step: int, rate: float, loss: float) -> float:
        self._buckets.finish()
        return self._update.apply(step, rate, loss)

    def settle(self, step: int, rate: float) -> dict[str, Any]:
        """Servers have every replica's steps then, and save them; the optimizer counts by `updates`."""
        return {"updates": self._update.save()}

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        """Rank 0's values are the run's; the others pull them."""
        self._has_to_give = self._is_first
        if self._is_first:
            self._update.runs.fill(fill)
        else:
            self._clear()

    def restored(self, step: int) -> None:
        self._update.step = step
        self._clear()

    def standing(self) -> Standing:
        return Standing()

    def recalled(self, step: int, rate: float) -> None:
        self.restored(step)

    def end(self) -> None:
        self._update.close()

    def blocks(self) -> list[Block]:
        return []

    @property
    def weight_bytes(self) -> int:
        return self._update.runs.nbytes

    @property
    def state_bytes(self) -> int:
        return self._buckets.nbytes

    def close(self) -> None:
        self._buckets.close()

    def _clear(self) -> None:
        """Numbers where nothing was pulled yet: rows of the table that no token has had."""
        for run in self._update.runs.whole:
            run.zero_()
