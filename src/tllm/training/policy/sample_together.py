"""Lets all replicas sample the completions that rank 0 asks for, and brings them back to rank 0 in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.data.batch_feed import LIMIT
from tllm.training.data.packing import deal
from tllm.training.policy.rollouts import (
    Completion,
    CompletionSampling,
    PromptGroup,
    RolloutOrder,
    Rollouts,
    SampledPart,
    decode_order,
    decode_part,
)
from tllm.training.step.rank_groups import RankConfig


def dealt(groups: Sequence[PromptGroup], stop_ids: Sequence[int], plan: Plan) -> RolloutOrder:
    """The groups shared out over the replicas, in order."""
    parts = deal(len(groups), plan.dp)
    return RolloutOrder(tuple(tuple(groups[p.start : p.stop]) for p in parts), tuple(stop_ids))


def sample_together(
    config: RankConfig, rollouts: Rollouts, sampling: CompletionSampling, order: RolloutOrder | None
) -> tuple[RolloutOrder, list[Completion]]:
    """Every rank calls it, with the `order` on rank 0: the order, and there the completions of all its groups, one by
    one.

    Of an order without groups there are none, nor of one with a fault, which sampling may bring too: on every rank.
    """
    world = config.groups.world
    payload = None if order is None else msgspec.msgpack.encode(order)
    asked = decode_order(world.broadcast_bytes(payload, limit=LIMIT))
    if asked.fault is not None or not any(asked.groups):
        return asked, []
    try:
        mine = SampledPart(tuple(rollouts.sample(rollouts.share(asked), asked.stop_ids, sampling)))
    except ConfigError as error:
        mine = SampledPart(fault=(error.message, error.hint))
    parts = [decode_part(part) for part in world.gather_bytes(msgspec.msgpack.encode(mine), limit=LIMIT)]
    fault = next((part.fault for part in parts if part.fault is not None), None)
    told = decode_part(world.broadcast_bytes(msgspec.msgpack.encode(SampledPart(fault=fault)) if parts else None))
    if told.fault is not None:
        return RolloutOrder((), (), told.fault), []
    return asked, [one for part in parts for one in part.completions]


OrderOf = Callable[[int], RolloutOrder]
"""What a step asks for; rank 0 knows it."""


class StepSampler(Protocol):
    """Where a feed has the completions of one step after another from. Every rank makes the same calls.

    `tool_seconds` and `metrics`, which are rank 0's, are of the last step.
    """

    @property
    def tool_seconds(self) -> float: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    def begin(self, step: int, stop: int) -> None:
        """Start with `step`, 0 being the run's first; steps from `stop` on do not come."""

    def of_step(self, step: int, order_of: OrderOf | None) -> tuple[RolloutOrder, list[Completion]]:
        """The order of a step, with its fault on every rank, and its completions, which are whole on rank 0."""

    def position(self, position: bytes, step: int) -> bytes:
        """Where in the data `step` begins, and what is at hand of it and of later steps, as snapshots keep it."""

    def close(self) -> None: ...


class CompletionSampler:
    """Samples what rank 0 asks for, one turn of each completion. Every rank makes the same calls.

    A `StepSampler` of completions that are sampled when their step begins.
    """

    tool_seconds = 0.0
    """What tools took in the last call."""

    def __init__(self, config: RankConfig, rollouts: Rollouts, sampling: CompletionSampling) -> None:
        self.config, self.rollouts, self.sampling = config, rollouts, sampling

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the rollouts tell."""
        return self.rollouts.metrics

    def begin(self, step: int, stop: int) -> None:
        """Nothing: no step is sampled before its turn."""

    def of_step(self, step: int, order_of: OrderOf | None) -> tuple[RolloutOrder, list[Completion]]:
        """Sampled now, with the weights as they are."""
        return self(None if order_of is None else order_of(step))

    def position(self, position: bytes, step: int) -> bytes:
        """The place in the data: nothing else is at hand."""
        return position

    def close(self) -> None:
        """Nothing: the rollouts are closed by who made them."""

    def __call__(self, order: RolloutOrder | None) -> tuple[RolloutOrder, list[Completion]]:
        """The `order`, which rank 0 gives, and the completions of all its groups, one by one; of a fault none."""
        return sample_together(self.config, self.rollouts, self.sampling, order)
