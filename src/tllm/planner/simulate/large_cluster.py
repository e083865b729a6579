"""A training step of all ranks of a large cluster: each replica's schedule on clocks, then all-reduces over replicas.

Replicas with the same work on devices that are equally fast and equally far apart take the same time: one of them is
played and stands for all. The ranks of a stage share a clock, as they synchronize in every layer; each has its own
links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tllm.planner.simulate.pipeline import OpSpan
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import ReplicaStep, StepPrediction
from tllm.spec.plan import Plan
from tllm.spec.process_groups import computing

Order = Literal["replicas", "stages"]


class RankTime(NamedTuple):
    """What a rank's step is spent on, in seconds; the sum is the step."""

    products: float
    """Matrix products and attention."""
    memory: float
    """Elementwise operations, which go through memory."""
    layers: float
    """Waiting for messages inside layers (tp, cp, ep)."""
    stages: float
    """Waiting for other stages."""
    replicas: float
    """Waiting for other replicas."""
    gradients: float
    """Exposed all-reduces of gradients, gathers of weights, and the update."""


@dataclass(frozen=True)
class ClusterStep:
    """One step of all ranks. `replicas` were played; `stands_for[replica]` is the one of them that stands for a
    replica."""

    placed: PlacedPlan
    prediction: StepPrediction
    replicas: Mapping[int, ReplicaStep]
    stands_for: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(computing(self.placed.plan))

    @property
    def ops(self) -> int:
        """Ops of all ranks in a step: passes of one microbatch through one run of layers."""
        plan = self.placed.plan
        of_replica = {
            index: sum(
                len(spans) * plan.cp * plan.stages[stage].tp
                for stage, spans in enumerate(replica.timeline.spans if replica.timeline else ())
            )
            for index, replica in self.replicas.items()
        }
        return sum(of_replica[index] for index in self.stands_for)

    def spans(self, rank: int) -> tuple[OpSpan, ...]:
        """When a rank does which op."""
        timeline = self._replica(rank).timeline
        return timeline.spans[self.placed.plan.coordinates(rank).stage] if timeline else ()

    def time(self, rank: int) -> RankTime:
        """What a rank's step is spent on."""
        replica = self._replica(rank)
        stage = replica.stages[self.placed.plan.coordinates(rank).stage]
        total = replica.timeline.total if replica.timeline else 0.0
        slowest = max(other.seconds for other in self.replicas.values())
        return RankTime(
            stage.compute - stage.memory,
            stage.memory,
            stage.layers,
            max(0.0, total - stage.compute - stage.layers),
            slowest - replica.seconds,
            replica.gradients + self.prediction.seconds - slowest,
        )

    def _replica(self, rank: int) -> ReplicaStep:
        return self.replicas[self.stands_for[self.placed.plan.coordinates(rank).replica]]


def device_order(plan: Plan, order: Order) -> tuple[int, ...]:
    """The device of each rank. "replicas": one replica after another, as `tllm` numbers ranks. "stages": one stage of
    all replicas after another, so that replicas are close and neighbouring stages far apart (Megatron-LM's order)."""
    if order == "replicas":
        return tuple(range(plan.world_size))
    places = [plan.coordinates(rank) for rank in computing(plan)]
    ranks = sorted(computing(plan), key=lambda rank: (places[rank].stage, places[rank].replica, rank))
    device = {rank: number for number, rank in enumerate(ranks)}
    return tuple(device.get(rank, rank) for rank in range(plan.world_size))


def play_ranks(placed: PlacedPlan) -> ClusterStep:
    """Play a step of a plan on a cluster, op by op."""
    prediction, replicas = placed.play()
    return ClusterStep(placed, prediction, {replica.index: replica for replica in replicas}, tuple(placed.stands_for))
