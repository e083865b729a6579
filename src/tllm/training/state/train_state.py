"""`TrainState`: everything that a rank holds between two steps, which is what an in-memory snapshot copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from tllm.training.state.tensor_blocks import TensorBlock

WhenReady = Callable[[Callable[[], None]], Future[None]]
"""when_ready(work): have `work` done as soon as what it reads has its values, and before these change again."""


def immediately(work: Callable[[], None]) -> Future[None]:
    """The `WhenReady` of state that has its values as soon as the step is done."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


class FlatMemory:
    """The flat tensors of a rank's weights and optimizer states, `weights[number]` and `states[number]` of a bucket.

    They outlive the part that they were made for. A rank whose next part has the same `layout`, which says what of
    which tensor lies where, goes on in them: nothing is allocated, and what they hold is there already. One of None is
    like no other. `begun` counts how often their values have begun to change.
    """

    def __init__(
        self, layout: Hashable, weights: Sequence[Tensor] = (), states: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        self.layout, self.weights, self.states = layout, weights, states
        self.begun = 0

    def fits(self, layout: Hashable) -> bool:
        """Whether a part of this layout can go on in it."""
        return layout is not None and layout == self.layout


class TrainState(NamedTuple):
    """Blocks that are views, to copy and to fill. Names of what one replica alone has are `replica_local`'s.

    `updated`: what the step has updated, weights and optimizer states; it has its values when the step is done.
    `reduction`: what a `Reduction` keeps from step to step (residuals, delayed sums). `layout_bound`: what of that is
    of use only while the model is cut in the same way (PowerSGD's columns): the run can go on without it. These two
    have their values when `when_ready` says so, as a delayed sum may still be on its way.

    `memory` is that of `updated`, where that is all and stays in memory once this rank's part has ended.
    """

    updated: Sequence[TensorBlock] = ()
    reduction: Sequence[TensorBlock] = ()
    layout_bound: Sequence[TensorBlock] = ()
    when_ready: WhenReady = immediately
    memory: FlatMemory | None = None

    @property
    def blocks(self) -> list[TensorBlock]:
        """All of them, in this order."""
        return [*self.updated, *self.reduction, *self.layout_bound]
