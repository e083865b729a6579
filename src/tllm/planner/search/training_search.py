"""The best training plan for a cluster, over every axis, cut of the layers, pipeline schedule and use of memory.

Each layout (`training_layouts`) is first timed once. Then, the promising ones first, all that a layout leaves open is
tried: schedule and depth, ZeRO stage, sequence parallelism, offload, and the least recomputation that fits. A layout
whose lower bound is above the best plan known is skipped. The answer is exact if all other layouts were tried.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts, deal_microbatches
from tllm.planner.memory.training_memory import RankMemory
from tllm.planner.search.training_constraints import TrainingConstraints
from tllm.planner.search.training_layouts import MOST_DEVICES, TrainingLayout, TrainingLayouts
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.trainable import check_trainable

STEPS, STEPS_OF_MANY = 1000, 2000
"""The default budgets: plans whose time or memory may be predicted before the search is cut short; the second for more
than MOST_DEVICES devices (some seconds, and less than a minute)."""

RANKS_A_STEP = 4
"""A prediction that plays so many ranks counts as one step of the budget."""

FREE = TrainingConstraints()

SCHEDULES = (("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zero_bubble", 1), ("zero_bubble", 2), ("gpipe", 1))


@dataclass(frozen=True)
class TrainingChoice:
    """A plan on devices, its predicted step, and the memory of the ranks that stand for all."""

    placed: PlacedPlan
    predicted: StepPrediction
    memory: tuple[RankMemory, ...]


@dataclass(frozen=True)
class TrainingSearchResult:
    """The best plan of each layout that fits, the fastest first."""

    choices: tuple[TrainingChoice, ...]
    exact: bool
    """Whether no plan that the constraints allow is faster than the first."""
    steps: int
    """Steps of the budget that were used."""


def best_training(
    spec: ModelSpec,
    cluster: Cluster,
    facts: TrainingFacts,
    top: int = 1,
    steps: int | None = None,
    constraints: TrainingConstraints = FREE,
) -> TrainingSearchResult:
    """The best plan of each of the `top` best layouts. `facts.microbatch_size` is chosen too.

    Raises CapacityError where the model fits nowhere.
    """
    if steps is None:
        steps = STEPS if len(cluster) <= MOST_DEVICES else STEPS_OF_MANY
    return _Search(spec, cluster, facts, top, steps, constraints).run()


class _Search:
    """One search: its budget of steps, and the best plan found for each layout."""

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        facts: TrainingFacts,
        top: int,
        steps: int,
        constraints: TrainingConstraints,
    ) -> None:
        self.spec, self.cluster, self.steps_left, self.steps = spec, cluster, steps, steps
        self.top, self.constraints = top, constraints
        self.layouts = TrainingLayouts(spec, cluster, facts, constraints)
        self.best: list[TrainingChoice] = []
        """The best plan of each layout tried, the fastest first."""
        self.tightest: tuple[int, RankMemory] | None = None
        """Of the plans that do not fit, the one that needs least: a device's memory, and the fullest rank on it."""

    def run(self) -> TrainingSearchResult:
        is_cut_short = False
        for layout in self._promising_first():
            if layout.lower_bound >= self._to_beat():
                continue
            if self.steps_left <= 0 and (self.best or self._gives_up()):
                is_cut_short = True
                break
            self._try(layout)
        if not self.best:
            raise self._too_large()
        exact = self.layouts.is_exhaustive and not is_cut_short
        choices = sorted(map(_played_whole, self.best[: self.top]), key=_seconds)
        return TrainingSearchResult(tuple(choices), exact, self.steps - self.steps_left)

    def _gives_up(self) -> bool:
        """Whether nothing more is looked at although nothing fits: on many devices after four budgets."""
        return self.layouts.are_many and self.steps_left <= -3 * self.steps

    def _promising_first(self) -> list[TrainingLayout]:
        """All layouts. One layout of each choice of axes is timed first, then as many as the budget allows, those with
        the fastest axes first."""
        by_axes = defaultdict[object, list[TrainingLayout]](list)
        for layout in self.layouts:
            plan = layout.plan
            by_axes[layout.devices, plan.replicas, plan.pp, plan.cp, plan.tensor].append(layout)
        # Estimates know nothing of bubbles, which several chunks have more of than a zero bubble schedule of one.
        groups = [sorted(group, key=lambda one: (one.plan.chunks, one.estimate)) for group in by_axes.values()]
        groups.sort(key=lambda group: group[0].estimate)
        layouts = [layout for index in self._fastest_first([group[0] for group in groups]) for layout in groups[index]]
        return [layouts[index] for index in self._fastest_first(layouts)]

    def _fastest_first(self, layouts: Sequence[TrainingLayout]) -> list[int]:
        """The indices of layouts: those that a quarter of all steps suffices to time by their seconds, then the
        rest."""
        limit, seconds = self.steps_left - self.steps // 4, list[float]()
        for layout in layouts:
            if self.steps_left <= limit:
                break
            seconds.append(self._time(layout))
        return [*sorted(range(len(seconds)), key=seconds.__getitem__), *range(len(seconds), len(layouts))]

    def _time(self, layout: TrainingLayout) -> float:
        """Seconds of a step with everything left open at its default; infinite where that is impossible.

        Of many devices pipelines are compared as zero bubble schedules play them, which most of the best have."""
        plan = layout.plan
        if self.layouts.are_many and plan.pp > 1 and plan.chunks == 1:
            plan = msgspec.structs.replace(plan, schedule="zero_bubble")
        placed = self._placed(layout, plan)
        self._count(placed)
        try:
            return placed.predict().seconds
        except PlanError:
            return math.inf

    def _count(self, placed: PlacedPlan) -> None:
        """Take from the budget one step for each few ranks that are played."""
        ranks = len(placed.replicas) * placed.plan.replica_size
        self.steps_left -= max(1, ranks // RANKS_A_STEP)

    def _try(self, layout: TrainingLayout) -> None:
        """Try all that a layout leaves open, and keep the best plan. On many devices a schedule is chosen after the
        rest."""
        plans = list(self._plans(layout))
        if not plans:
            return
        if not self.layouts.are_many:
            best = self._best_of(layout, plans)
        else:
            default = plans[0].schedule, plans[0].depth
            best = self._best_of(layout, [plan for plan in plans if (plan.schedule, plan.depth) == default])
            if best is not None:
                best = min(
                    filter(None, (best, self._best_of(layout, _with_other_schedules(best, plans)))), key=_seconds
                )
        if best is not None:
            insort(self.best, best, key=_seconds)

    def _best_of(self, layout: TrainingLayout, plans: Iterable[Plan]) -> TrainingChoice | None:
        """The fastest of some plans of a layout that fit."""
        choices = (self._with_least_recompute(layout, plan) for plan in plans)
        return min(filter(None, choices), key=_seconds, default=None)

    def _to_beat(self) -> float:
        """Seconds of the last of the `top` best plans."""
        return math.inf if len(self.best) < self.top else self.best[self.top - 1].predicted.seconds

    def _plans(self, layout: TrainingLayout) -> Iterator[Plan]:
        """Plans of a layout with every schedule and depth, ZeRO stage, sequence parallelism and offload."""
        plan = layout.plan
        orders = SCHEDULES if plan.pp > 1 and plan.chunks == 1 else ((plan.schedule, 1),)
        highest = 2 if plan.grid is not None else 3  # on a grid trainers refuse ZeRO 3, and sequence parallelism
        zeros = range(highest + 1) if plan.replicas * plan.cp > 1 else (0,)
        sequences = (False, True) if plan.stages[0].tp > 1 and plan.grid is None else (False,)
        disks = all(self.cluster.devices[device].disk_bandwidth for device in layout.devices)
        for (schedule, depth), zero, sequence in product(orders, zeros, sequences):
            for offload in ("none", "disk") if disks else ("none",):
                candidate = msgspec.structs.replace(
                    plan, schedule=schedule, depth=depth, zero=zero, sequence=sequence, offload=offload
                )
                try:
                    check_trainable(candidate, self.spec, deal_microbatches(layout.facts.microbatches, plan.dp))
                    self.constraints.check(candidate, layout.facts)
                except PlanError:
                    continue  # a trainer would refuse it
                yield candidate

    def _with_least_recompute(self, layout: TrainingLayout, plan: Plan) -> TrainingChoice | None:
        """The plan with as little recomputation as fits in memory, which is the fastest; None where nothing fits."""
        for recompute in ("none", "selective", "layer"):
            placed = self._placed(layout, msgspec.structs.replace(plan, recompute=recompute))
            self._count(placed)
            memory = placed.memory(placed.replicas)
            if placed.fits(memory):
                return TrainingChoice(placed, placed.predict(), tuple(memory))
            fullest = max(memory, key=lambda rank: rank.total)
            if self.tightest is None or fullest.total < self.tightest[1].total:
                self.tightest = (placed.cluster.devices[placed.devices[fullest.rank]].memory, fullest)
        return None

    def _placed(self, layout: TrainingLayout, plan: Plan) -> PlacedPlan:
        return PlacedPlan(self.spec, plan, layout.facts, self.cluster, layout.devices, steady=self.layouts.are_many)

    def _too_large(self) -> CapacityError:
        if self.tightest is None:
            return CapacityError("no plan can be made for so few rows", "give a larger batch, or fewer nodes")
        memory, needed = self.tightest[0], self.tightest[1].total
        return CapacityError(
            f"no plan that was looked at fits: the one that needs least takes {needed / 2**30:.2f} GiB on a node "
            f"that has {memory / 2**30:.2f} GiB ({(needed - memory) / 2**30:.2f} GiB more would be enough)",
            "give more or larger nodes, a smaller dtype or shorter rows",
        )


def _seconds(choice: TrainingChoice) -> float:
    return choice.predicted.seconds


def _played_whole(choice: TrainingChoice) -> TrainingChoice:
    """The choice with a prediction for which every microbatch is played."""
    if not choice.placed.steady:
        return choice
    placed = replace(choice.placed, steady=False)
    return replace(choice, placed=placed, predicted=placed.predict())


def _with_other_schedules(choice: TrainingChoice, plans: Sequence[Plan]) -> list[Plan]:
    """Of a layout's plans those that differ from the chosen one in their schedule alone, recomputation left aside."""
    one = choice.placed.plan
    same = (plan for plan in plans if (plan.zero, plan.sequence, plan.offload) == (one.zero, one.sequence, one.offload))
    return [plan for plan in same if (plan.schedule, plan.depth) != (one.schedule, one.depth)]
