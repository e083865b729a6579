"""The best training plan for a cluster: over every axis, the cut of layers, the order in time, and what is kept where.

Each layout is first timed once. Then, the promising ones first, all that a layout leaves open is tried: schedule and
depth, ZeRO, sequence parallelism, offload, and the least recomputation that fits. A layout whose compute alone takes
longer than the best plan known is not looked at. The answer is exact if all others were; else it was pruned.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts, deal_microbatches
from tllm.planner.memory.training_memory import RankMemory
from tllm.planner.search.training_layouts import TrainingConstraints, TrainingLayout, TrainingLayouts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.trainable import check_trainable

STEPS = 1000
"""Plans whose seconds or memory are worked out before the search is cut short: a few seconds."""

RANKS_A_STEP = 4
FREE = TrainingConstraints()

SCHEDULES = (("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("gpipe", 1))


@dataclass(frozen=True)
class TrainingChoice:
    """A plan on devices, what a step comes to, and the memory of the ranks that stand for all."""

    placed: PlacedPlan
    predicted: StepPrediction
    memory: tuple[RankMemory, ...]


@dataclass(frozen=True)
class TrainingSearchResult:
    """The best plan of each layout that fits, the best first. `exact`: none of those looked for is better."""

    choices: tuple[TrainingChoice, ...]
    exact: bool
    steps: int


def best_training(
    spec: ModelSpec,
    cluster: Cluster,
    facts: TrainingFacts,
    top: int = 1,
    steps: int = STEPS,
    pinned: TrainingConstraints = FREE,
) -> TrainingSearchResult:
    """The best of the `top` best layouts. `facts.microbatch_size` is chosen too, among those that may be.

    CapacityError where the model fits nowhere.
    """
    return _Search(spec, cluster, facts, top, steps, pinned).found()


class _Search:
    def __init__(
        self, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, top: int, steps: int, pinned: TrainingConstraints
    ) -> None:
        self.spec, self.cluster, self.left, self.steps = spec, cluster, steps, steps
        self.top, self.pinned = top, pinned
        self.layouts = TrainingLayouts(spec, cluster, facts, pinned)
        self.of_layout: list[TrainingChoice] = []
        self.tightest: tuple[int, RankMemory] | None = None

    def found(self) -> TrainingSearchResult:
        unseen = False
        for layout in self._promising_first():
            if layout.lower_bound >= self._to_beat():
                continue
            if self.left <= 0 and self.of_layout:
                unseen = True
                break
            self._look(layout)
        if not self.of_layout:
            raise self._too_large()
        return TrainingSearchResult(
            tuple(self.of_layout[: self.top]), self.layouts.is_exhaustive and not unseen, self.steps - self.left
        )

    def _promising_first(self) -> list[TrainingLayout]:
        """All layouts: first one of each choice of axes is timed, then as many as may be, of the fastest axes first."""
        of_axes = defaultdict[object, list[TrainingLayout]](list)
        for layout in self.layouts:
            plan = layout.plan
            of_axes[layout.devices, plan.replicas, plan.pp, plan.cp].append(layout)
        several = [sorted(some, key=lambda one: one.lower_bound) for some in of_axes.values()]
        several.sort(key=lambda some: some[0].lower_bound)
        layouts = [one for number in self._probed([some[0] for some in several]) for one in several[number]]
        return [layouts[number] for number in self._probed(layouts)]

    def _probed(self, layouts: Sequence[TrainingLayout]) -> list[int]:
        """The numbers of layouts, the fastest first; of more than a quarter of all steps is for, as they come."""
        limit, seconds = self.left - self.steps // 4, list[float]()
        for layout in layouts:
            if self.left <= limit:
                break
            seconds.append(self._probe(layout))
        return [*sorted(range(len(seconds)), key=seconds.__getitem__), *range(len(seconds), len(layouts))]

    def _probe(self, layout: TrainingLayout) -> float:
        """Seconds in the plainest way; infinite where that cannot be."""
        placed = self._placed(layout, layout.plan)
        self._count(placed)
        try:
            return placed.predict().seconds
        except PlanError:
            return math.inf

    def _count(self, placed: PlacedPlan) -> None:
        """One step for each few ranks that are looked at."""
        self.left -= max(1, len(placed.replicas) * placed.plan.replica_size // RANKS_A_STEP)

    def _look(self, layout: TrainingLayout) -> None:
        """Try all that a layout leaves open, and keep the best."""
        best: TrainingChoice | None = None
        for plan in self._plans(layout):
            choice = self._least_again(layout, plan)
            if choice is not None and (best is None or choice.predicted.seconds < best.predicted.seconds):
                best = choice
        if best is not None:
            insort(self.of_layout, best, key=lambda choice: choice.predicted.seconds)

    def _to_beat(self) -> float:
        """Seconds of the last of the best."""
        return math.inf if len(self.of_layout) < self.top else self.of_layout[self.top - 1].predicted.seconds

    def _plans(self, layout: TrainingLayout) -> Iterator[Plan]:
        plan = layout.plan
        orders = SCHEDULES if plan.pp > 1 and plan.chunks == 1 else ((plan.schedule, 1),)
        zeros = (0, 1, 2, 3) if plan.replicas * plan.cp > 1 else (0,)
        sequences = (False, True) if plan.stages[0].tp > 1 else (False,)
        disks = all(self.cluster.devices[device].disk_bandwidth for device in layout.devices)
        for (schedule, depth), zero, sequence in product(orders, zeros, sequences):
            for offload in ("none", "disk") if disks else ("none",):
                made = msgspec.structs.replace(
                    plan, schedule=schedule, depth=depth, zero=zero, sequence=sequence, offload=offload
                )
                try:
                    check_trainable(made, self.spec, deal_microbatches(layout.facts.microbatches, plan.dp))
                    self.pinned.check(made, layout.facts)
                except PlanError:
                    continue  # what a trainer would refuse
                yield made

    def _least_again(self, layout: TrainingLayout, plan: Plan) -> TrainingChoice | None:
        """The plan with as little recomputation as fits, which is the fastest; None where nothing fits."""
        for recompute in ("none", "selective", "layer"):
            placed = self._placed(layout, msgspec.structs.replace(plan, recompute=recompute))
            self._count(placed)
            memory = placed.memory(placed.replicas)
            if placed.fits(memory):
                return TrainingChoice(placed, placed.predict(), tuple(memory))
            most = max(memory, key=lambda one: one.total)
            if self.tightest is None or most.total < self.tightest[1].total:
                self.tightest = (placed.cluster.devices[placed.devices[most.rank]].memory, most)
        return None

    def _placed(self, layout: TrainingLayout, plan: Plan) -> PlacedPlan:
        return PlacedPlan(self.spec, plan, layout.facts, self.cluster, layout.devices)

    def _too_large(self) -> CapacityError:
        if self.tightest is None:
            return CapacityError("no plan can be made for so few rows", "give a larger batch, or fewer nodes")
        memory, most = self.tightest
        return CapacityError(
            f"no plan that was looked at fits: the one that needs least takes {most.total / 2**30:.2f} GiB on a node "
            f"that has {memory / 2**30:.2f} GiB ({(most.total - memory) / 2**30:.2f} GiB more would be enough)",
            "give more or larger nodes, a smaller dtype or shorter rows",
        )
