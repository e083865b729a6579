"""`TrainState`: what a rank has between two steps, as it is, with nothing settled: what a copy in memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tllm.train.state.tensor_blocks import TensorBlock

Later = Callable[[Callable[[], None]], Future[None]]
"""later(work): have `work` done as soon as it can be, and before anything changes that it looks at."""


def at_once(work: Callable[[], None]) -> Future[None]:
    """For what is there already."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


class TrainState(NamedTuple):
    """Blocks that are views, to copy and to fill; what one replica alone has bears a name as
    `train.state.replica_local` gives it.

    `moved` is what the step has moved, weights and states. `kept` is what a `Reduction` keeps, and `bound` what of it
    is of no use where replicas are cut otherwise: the run goes on without. Both are there `later`.
    """

    moved: Sequence[TensorBlock] = ()
    kept: Sequence[TensorBlock] = ()
    bound: Sequence[TensorBlock] = ()
    later: Later = at_once
