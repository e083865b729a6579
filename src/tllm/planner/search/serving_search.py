"""The best serving plan for a cluster: which devices, in which order, in which stages, with which layers and shares.

The best plan of each number of stages and of devices is searched for by branch and bound (`branch_and_bound`). The
answer is exact unless the allowed number of steps runs out, or the devices are too many and too different to try every
team and order; then it is the best of those that were tried.

Of a larger cluster the `MOST_DEVICES` with the fastest memory are looked at; where the model has no room on these,
those with the most memory; and where it has none there, pipelines of as many as it takes (`_Pipelines`), without grids.

Plans whose stages are grids of ranks are searched for after all others, below the time of the best of these: so one is
found only where it is predicted to win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tllm.core.errors import CapacityError, PlanError, counted
from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.device_kinds import kinds_of
from tllm.planner.cost.serving_load import ServingFacts, ServingLoad, loads
from tllm.planner.cost.stage_team import StageTeam
from tllm.planner.search.branch_and_bound import BranchAndBound, SearchSpace
from tllm.planner.search.stage_options import Division, StageOption, options_of
from tllm.planner.simulate.serving import ServingPrediction, predict_serving
from tllm.spec.cut import cut_stage
from tllm.spec.grid.grid_shape import MODES, TensorMode
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Experts, Plan, Stage

STEPS = 400_000
"""Stages that are tried before the search is cut short: a few seconds."""

MOST_DEVICES = 16
"""Of a larger cluster only so many are searched through, as long as these are enough."""

WIDTHS = (1, 2, 4, 8)
"""Devices of a stage that are tried where more are needed."""

LONGER = (1.0, 1.25, 1.5, 2.0)
"""Pipelines so many times as long as the shortest that has room are tried."""


@dataclass(frozen=True)
class ServingChoice:
    """A plan, the device of each of its ranks, and its predicted times and memory."""

    plan: Plan
    devices: tuple[int, ...]
    predicted: ServingPrediction


@dataclass(frozen=True)
class ServingSearchResult:
    """The best plan of each number of stages and of devices that fits, the fastest first."""

    choices: tuple[ServingChoice, ...]
    exact: bool
    """Whether no plan at all is faster than the first."""
    steps: int
    """Stages that were tried."""


def best_serving(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, steps: int = STEPS) -> ServingSearchResult:
    """The best plans by predicted seconds for all requests. Raises CapacityError where the model fits nowhere."""
    for devices in _candidates(cluster):
        if (found := _best_on(spec, cluster, facts, steps, devices)) is not None:
            return found
    everything = range(len(cluster))
    choices = _Pipelines(spec, cluster, facts).choices() if len(cluster) > MOST_DEVICES else []
    if not choices:
        raise _too_large(spec, cluster, facts, everything)
    return ServingSearchResult(tuple(sorted(choices, key=_seconds)), False, 0)


def _best_on(
    spec: ModelSpec, cluster: Cluster, facts: ServingFacts, steps: int, devices: Sequence[int]
) -> ServingSearchResult | None:
    """The best plans on some devices; None where the model has no room there.

    One with a grid of ranks is among them where it is faster than all without.
    """
    one_way = _Searches(spec, cluster, facts, devices, [Division(experts) for experts in _experts(spec)])
    one_way.run(steps)
    grids = _Searches(spec, cluster, facts, devices, [Division(tensor=mode) for mode in _grids(facts)])
    grids.run(steps // 4, one_way.best)
    searches = [*one_way.searches, *grids.searches]
    successful = sorted((search for search in searches if search.chosen), key=lambda search: search.best)
    if not successful:
        return None
    are_all = len(devices) == len(cluster) and one_way.is_exhaustive and grids.is_exhaustive
    return ServingSearchResult(
        tuple(_choice(search) for search in _best_of_each_space(successful)),
        are_all and all(search.is_complete or search.root_bound >= successful[0].best for search in searches),
        sum(search.steps for search in searches),
    )


class _Searches:
    """The searches of some devices for plans whose stages are divided in these ways."""

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        facts: ServingFacts,
        devices: Sequence[int],
        divisions: Iterable[Division],
    ) -> None:
        kinds = kinds_of(cluster, devices)
        self.searches, self.is_exhaustive = list[BranchAndBound](), True
        for division in divisions:
            options, is_exhaustive = options_of(spec, cluster, facts, kinds, division)
            self.is_exhaustive = self.is_exhaustive and is_exhaustive
            smallest = min((len(option.order) for option in options if division.grid(len(option.order))), default=1)
            if division.tensor != "1d" and smallest == 1:
                continue  # no grid has room, or none is for this model
            for load in _loads(facts, min(len(devices) - smallest + 1, spec.num_layers)):
                timed = [option.timed(load) for option in options]
                for count in range(load.stages + smallest - 1, len(devices) + 1):
                    self.searches.append(
                        BranchAndBound(SearchSpace(spec, cluster, load, kinds, timed, count, division))
                    )

    @property
    def best(self) -> float:
        """The seconds of the best plan found."""
        return min((search.best for search in self.searches), default=math.inf)

    def run(self, steps: int, below: float = math.inf) -> None:
        """Try so many stages, for plans that take less than `below` seconds."""
        promising = [search for search in self.searches if search.root_bound < below]
        for search in promising:
            search.run(steps // (2 * len(promising)), below)
        best = min(self.best, below)
        unfinished = [search for search in promising if not search.is_complete and search.root_bound < best]
        for search in unfinished:
            search.run(steps // (2 * len(unfinished)), min(self.best, below))


def _candidates(cluster: Cluster) -> list[list[int]]:
    """Sets of devices to search through, in the cluster's order: those with the fastest memory, then the most of it."""
    devices = cluster.devices
    by_speed = sorted(range(len(cluster)), key=lambda device: -devices[device].memory_bandwidth)
    sets = [sorted(order[:MOST_DEVICES]) for order in (by_speed, _by_room(cluster))]
    return sets[:1] if sets[0] == sets[1] else sets


def _by_room(cluster: Cluster) -> list[int]:
    """All devices, those with the most memory first, and of equal ones those with the fastest."""
    devices = cluster.devices
    return sorted(range(len(cluster)), key=lambda device: (-devices[device].memory, -devices[device].memory_bandwidth))


def _seconds(choice: ServingChoice) -> float:
    return choice.predicted.seconds


def _loads(facts: ServingFacts, most_stages: int) -> list[ServingLoad]:
    """Loads of every number of stages."""
    return [load for stages in range(1, most_stages + 1) for load in loads(stages, facts)]


def _best_of_each_space(searches: Sequence[BranchAndBound]) -> list[BranchAndBound]:
    """The first, best one of those that differ only in the number of draft tokens."""
    first: dict[tuple[int, int, Division], BranchAndBound] = {}
    for search in searches:
        first.setdefault((search.space.stages, search.space.device_count, search.space.division), search)
    return list(first.values())


def _experts(spec: ModelSpec) -> tuple[Experts, ...]:
    return ("cut", "spread") if any(layer.moe for layer in spec.layers) else ("cut",)


def _grids(facts: ServingFacts) -> tuple[TensorMode, ...]:
    """The grids to try: none for weights of few bits, which are not cut both ways. What else a model has that is not,
    `spec.cut` knows."""
    return () if facts.has_few_bits else MODES[1:]


def _choice(search: BranchAndBound) -> ServingChoice:
    """The plan that a search found, with devices in the place of kinds."""
    space = search.space
    stages, devices, start = [], [], 0
    unused = [list(kind) for kind in space.kinds]
    for timed, stop in search.chosen:
        stages.append(Stage(start, stop, timed.option.shares))
        devices += [unused[kind].pop(0) for kind in timed.option.order]
        start = stop
    plan = Plan(tuple(stages), *space.division)
    predicted = predict_serving(space.spec, plan, space.cluster, devices, space.load.facts)
    return ServingChoice(plan, tuple(devices), predicted)


class _Pipelines:
    """Plans for more than `MOST_DEVICES` devices: each stage is one device, or as many of like memory as share one
    evenly, those with the most memory first; the second of these ends the model, as the logits take room. The layers
    are cut so that the slowest stage of a step is the fastest, or so that all stages together are."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, facts: ServingFacts) -> None:
        self.spec, self.cluster, self.facts = spec, cluster, facts
        self.order = _by_room(cluster)
        self.known: dict[object, StageOption | None] = {}

    def choices(self) -> list[ServingChoice]:
        """The best plan of each width, number of stages and way to divide experts, where it fits."""
        found = list[ServingChoice]()
        for width in (width for width in WIDTHS if width * 2 <= len(self.order)):
            for experts in _experts(self.spec) if width > 1 else ("cut",):
                teams = self._teams(width, experts)
                for count in self._lengths(teams):
                    plans = [
                        self._cut(_ended(teams[:count]), experts, load, by)
                        for load in loads(count, self.facts)
                        for by in (max, sum)
                    ]
                    found += sorted(filter(None, plans), key=_seconds)[:1]
        return found

    def _teams(self, width: int, experts: Experts) -> list[StageOption]:
        """As many as there are, up to the first in which no layer has room."""
        teams = list[StageOption]()
        for at in range(0, len(self.order) - width + 1, width):
            option = self._option(tuple(self.order[at : at + width]), experts)
            if option is None:
                break
            teams.append(option)
        return teams[: self.spec.num_layers]

    def _option(self, devices: tuple[int, ...], experts: Experts) -> StageOption | None:
        key = experts, self.cluster.pattern(devices)
        if key not in self.known:
            shares = (1,) * len(devices)
            try:
                cuts = cut_stage(self.spec, shares, experts)
            except PlanError:
                return None  # there are more ranks than there is to cut
            team = StageTeam(self.spec, self.cluster, devices, cuts, self.facts)
            option = StageOption((len(devices),), devices, shares, team)
            self.known[key] = option if option.max_layers else None
        known = self.known[key]
        return None if known is None else replace(known, order=devices)

    def _lengths(self, teams: Sequence[StageOption]) -> list[int]:
        """How many stages to try: the fewest that have room for all layers, and some more."""
        stop, count = 0, 0
        for option in teams:
            if stop == self.spec.num_layers:
                break
            stop, count = option.max_stop(stop), count + 1
        if stop < self.spec.num_layers:
            return []
        lengths = {math.ceil(count * longer) for longer in LONGER} | {count + 1}
        return sorted(length for length in lengths if length <= len(teams))

    def _cut(
        self, teams: Sequence[StageOption], experts: Experts, load: ServingLoad, by: Callable[[Iterable[float]], float]
    ) -> ServingChoice | None:
        """The cut of the layers with the least decode step, by its slowest stage or by all of them."""
        layers, timed = self.spec.num_layers, [option.timed(load) for option in teams]
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage, option in enumerate(timed):
            is_last = stage == len(timed) - 1
            reached = dict[int, tuple[float, tuple[int, ...]]]()
            for start, (cost, stops) in best.items():
                for stop in (
                    [layers] if is_last else range(start + 1, min(option.option.max_stop(start), layers - 1) + 1)
                ):
                    if is_last and not option.option.team.fits(range(start, layers)):
                        continue
                    seconds = option.decode[stop] - option.decode[start] + option.ends[start == 0, is_last][1]
                    total = by((cost, seconds))
                    if stop not in reached or total < reached[stop][0]:
                        reached[stop] = (total, (*stops, stop))
            best = reached
        if layers not in best:
            return None
        stops = (0, *best[layers][1])
        stages = tuple(Stage(a, b, option.shares) for (a, b), option in zip(pairwise(stops), teams, strict=True))
        plan, devices = Plan(stages, experts), tuple(device for option in teams for device in option.order)
        return ServingChoice(plan, devices, predict_serving(self.spec, plan, self.cluster, devices, load.facts))


def _ended(teams: list[StageOption]) -> list[StageOption]:
    """The second one last."""
    return [*teams[:1], *teams[2:], *teams[1:2]]


def _too_large(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, devices: Sequence[int]) -> CapacityError:
    """The error that says what one device would have to hold, and what all devices have."""
    team = StageTeam(spec, cluster, devices[:1], cut_stage(spec, (1,)), facts)
    (whole,) = team.memory(range(spec.num_layers))
    memory = sum(cluster.devices[device].memory for device in devices)
    needed = whole.weights + whole.cache
    return CapacityError(
        f"the model fits nowhere: weights take {whole.weights / 2**30:.2f} GiB and the cache of {facts.concurrency} "
        f"requests {whole.cache / 2**30:.2f} GiB, and {counted(len(devices), 'node has', 'nodes have')} "
        f"{memory / 2**30:.2f} GiB, of which each process takes {(whole.runtime + whole.working) / 2**30:.2f} GiB",
        f"{max(0.0, needed + len(devices) * whole.runtime - memory) / 2**30:.2f} GiB more would be the least"
        if needed + len(devices) * whole.runtime > memory
        else "no cut makes parts that small: give nodes more memory, or ask for fewer or shorter requests",
    )
