"""`TrainState`: all that a rank holds between two steps, as it is: what a snapshot in memory copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tllm.training.state.tensor_blocks import TensorBlock

WhenReady = Callable[[Callable[[], None]], Future[None]]
"""when_ready(work): have `work` done as soon as what it reads has its values, and before these change again."""


def immediately(work: Callable[[], None]) -> Future[None]:
    """The `WhenReady` of state that has its values as soon as the step is done."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


class Changes:
    """Counts how often the weights and optimizer states have begun to change."""

    def __init__(self) -> None:
        self.begun = 0


class TrainState(NamedTuple):
    """Blocks that are views, to copy and to fill. What one replica alone has is named by `train.state.replica_local`.

    `updated`: what the step has updated, weights and optimizer states; it has its values when the step is done.
    `reduction`: what a `Reduction` keeps from step to step (residuals, delayed sums). `layout_bound`: what of that is
    of use only while the model is cut in the same way (PowerSGD's columns): the run can go on without it. These two
    have their values when `when_ready` says so, as a delayed sum may still be on its way.

    `changes` counts those of `updated`, where that is all and stays in memory once this rank's part has ended.
    """

    updated: Sequence[TensorBlock] = ()
    reduction: Sequence[TensorBlock] = ()
    layout_bound: Sequence[TensorBlock] = ()
    when_ready: WhenReady = immediately
    changes: Changes | None = None

    @property
    def blocks(self) -> list[TensorBlock]:
        """All of them, in this order."""
        return [*self.updated, *self.reduction, *self.layout_bound]
