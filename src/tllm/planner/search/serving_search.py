"""The best serving plan for a cluster: which devices, in which order, in which stages, with which layers and shares.

The best plan of each number of stages and of devices is searched for by branch and bound (`branch_and_bound`). The
answer is exact unless the allowed number of steps runs out, or the devices are too many and too different to try every
team and order; then it is the best of those that were tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm.core.errors import CapacityError
from tllm.planner.cluster.alike import kinds_of
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import ServingFacts, ServingLoad, loads
from tllm.planner.cost.stage_team import StageTeam, single_stage_plan
from tllm.planner.search.branch_and_bound import BranchAndBound, SearchSpace
from tllm.planner.search.stage_options import options_of
from tllm.planner.simulate.serving import ServingPrediction, predict_serving
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Experts, Plan, Stage

STEPS = 400_000
"""Stages that are tried before the search is cut short: a few seconds."""

MOST_DEVICES = 16
"""Of a larger cluster, those with the highest memory bandwidth are used."""


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
    devices = _candidates(cluster)
    kinds = kinds_of(cluster, devices)
    searches, exact = list[BranchAndBound](), len(devices) == len(cluster)
    for experts in _experts(spec):
        options, is_exhaustive = options_of(spec, cluster, facts, kinds, experts)
        exact = exact and is_exhaustive
        for load in _loads(facts, min(len(devices), spec.num_layers)):
            timed = [option.timed(load) for option in options]
            for count in range(load.stages, len(devices) + 1):
                searches.append(BranchAndBound(SearchSpace(spec, cluster, load, kinds, timed, count, experts)))
    for search in searches:
        search.run(steps // (2 * len(searches)))
    best = min(search.best for search in searches)
    unfinished = [search for search in searches if not search.is_complete and search.root_bound < best]
    for search in unfinished:
        search.run(steps // (2 * len(unfinished)), min(other.best for other in searches))
    successful = sorted((search for search in searches if search.chosen), key=lambda search: search.best)
    if not successful:
        raise _too_large(spec, cluster, facts, devices)
    return ServingSearchResult(
        tuple(_choice(search) for search in _best_of_each_space(successful)),
        exact and all(search.is_complete or search.root_bound >= successful[0].best for search in searches),
        sum(search.steps for search in searches),
    )


def _candidates(cluster: Cluster) -> list[int]:
    """The devices that may be used, in the cluster's order."""
    devices = sorted(range(len(cluster)), key=lambda device: -cluster.devices[device].memory_bandwidth)
    return sorted(devices[:MOST_DEVICES])


def _loads(facts: ServingFacts, most_stages: int) -> list[ServingLoad]:
    """Loads of every number of stages."""
    return [load for stages in range(1, most_stages + 1) for load in loads(stages, facts)]


def _best_of_each_space(searches: Sequence[BranchAndBound]) -> list[BranchAndBound]:
    """The first, best one of those that differ only in the number of draft tokens."""
    first: dict[tuple[int, int, Experts], BranchAndBound] = {}
    for search in searches:
        first.setdefault((search.space.stages, search.space.device_count, search.space.experts), search)
    return list(first.values())


def _experts(spec: ModelSpec) -> tuple[Experts, ...]:
    return ("cut", "spread") if any(layer.moe for layer in spec.layers) else ("cut",)


def _choice(search: BranchAndBound) -> ServingChoice:
    """The plan that a search found, with devices in the place of kinds."""
    space = search.space
    stages, devices, start = [], [], 0
    unused = [list(kind) for kind in space.kinds]
    for timed, stop in search.chosen:
        stages.append(Stage(start, stop, timed.option.shares))
        devices += [unused[kind].pop(0) for kind in timed.option.order]
        start = stop
    plan = Plan(tuple(stages), space.experts)
    predicted = predict_serving(space.spec, plan, space.cluster, devices, space.load.facts)
    return ServingChoice(plan, tuple(devices), predicted)


def _too_large(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, devices: Sequence[int]) -> CapacityError:
    """The error that says what one device would have to hold, and what all devices have."""
    team = StageTeam(spec, cluster, devices[:1], single_stage_plan((1,), spec.num_layers, "cut"), 0, facts)
    (whole,) = team.memory(range(spec.num_layers))
    memory = sum(cluster.devices[device].memory for device in devices)
    needed = whole.weights + whole.cache
    return CapacityError(
        f"the model fits nowhere: weights take {whole.weights / 2**30:.2f} GiB and the cache of {facts.concurrency} "
        f"requests {whole.cache / 2**30:.2f} GiB, and {len(devices)} nodes have {memory / 2**30:.2f} GiB, of which "
        f"each process takes {(whole.runtime + whole.working) / 2**30:.2f} GiB",
        f"{max(0.0, needed + len(devices) * whole.runtime - memory) / 2**30:.2f} GiB more would be the least"
        if needed + len(devices) * whole.runtime > memory
        else "no cut makes parts that small: give nodes more memory, or ask for fewer or shorter requests",
    )
