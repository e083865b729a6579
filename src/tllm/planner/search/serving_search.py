"""The best serving plan for a cluster: which devices, in which order, in which stages, with which layers and shares.

Of each number of stages and of devices the best is looked for by branch and bound. A part of a plan, its first stages,
is given up when another one with the same devices, layers and ends is nowhere slower; or when even the fastest devices
that are left, each filled up to its memory and reached in no time, could not make it better than what is known. So the
answer is exact unless the steps that may be taken run out, or devices are too many and too unlike; then it is pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm.core.errors import CapacityError
from tllm.planner.cluster.alike import kinds_of
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import ServingFacts, ServingLoad, loads
from tllm.planner.cost.stage_team import StageTeam, single_stage_plan
from tllm.planner.search.branch_and_bound import BranchAndBound
from tllm.planner.search.stage_options import options_of
from tllm.planner.simulate.serving import ServingPrediction, predict_serving
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Experts, Plan, Stage

STEPS = 400_000
"""Stages that are tried before the search is cut short: a few seconds."""

MOST_DEVICES = 16


@dataclass(frozen=True)
class ServingChoice:
    """A plan, the device of each of its ranks, and what it comes to."""

    plan: Plan
    devices: tuple[int, ...]
    predicted: ServingPrediction


@dataclass(frozen=True)
class ServingSearchResult:
    """The best plan of each number of stages and devices that fits, the best first. `exact`: none is better."""

    choices: tuple[ServingChoice, ...]
    exact: bool
    steps: int


def best_serving(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, steps: int = STEPS) -> ServingSearchResult:
    """Raises CapacityError where the model fits nowhere."""
    devices = _candidates(cluster)
    kinds = kinds_of(cluster, devices)
    searches, exact = list[BranchAndBound](), len(devices) == len(cluster)
    for experts in _experts(spec):
        options, everything = options_of(spec, cluster, facts, kinds, experts)
        exact = exact and everything
        for load in _loads(facts, min(len(devices), spec.num_layers)):
            timed = [option.timed(load) for option in options]
            for count in range(load.stages, len(devices) + 1):
                searches.append(BranchAndBound(spec, cluster, load, kinds, timed, count, experts))
    for search in searches:
        search.look(steps // (2 * len(searches)))
    best = min(search.best for search in searches)
    unsure = [search for search in searches if not search.complete and search.root < best]
    for search in unsure:
        search.look(steps // (2 * len(unsure)), min(other.best for other in searches))
    found = sorted((search for search in searches if search.chosen), key=lambda search: search.best)
    if not found:
        raise _too_large(spec, cluster, facts, devices)
    return ServingSearchResult(
        tuple(_choice(spec, cluster, facts, search) for search in _unlike(found)),
        exact and all(search.complete or search.root >= found[0].best for search in searches),
        sum(search.steps for search in searches),
    )


def _candidates(cluster: Cluster) -> list[int]:
    """All devices, or of many those whose memory is read fastest, in the cluster's order."""
    devices = sorted(range(len(cluster)), key=lambda device: -cluster.devices[device].memory_bandwidth)
    return sorted(devices[:MOST_DEVICES])


def _loads(facts: ServingFacts, most_stages: int) -> list[ServingLoad]:
    """Of every number of stages."""
    return [load for stages in range(1, most_stages + 1) for load in loads(stages, facts)]


def _unlike(found: Sequence[BranchAndBound]) -> list[BranchAndBound]:
    """The first of those that differ only in how many tokens are drafted."""
    first: dict[tuple[int, int, Experts], BranchAndBound] = {}
    for search in found:
        first.setdefault((search.stages, search.count, search.experts), search)
    return list(first.values())


def _experts(spec: ModelSpec) -> tuple[Experts, ...]:
    return ("cut", "spread") if any(layer.moe for layer in spec.layers) else ("cut",)


def _choice(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, search: BranchAndBound) -> ServingChoice:
    stages, devices, start = [], [], 0
    unused = [list(kind) for kind in search.kinds]
    for option, stop in search.chosen:
        stages.append(Stage(start, stop, option.shares))
        devices += [unused[kind].pop(0) for kind in option.order]
        start = stop
    plan = Plan(tuple(stages), search.experts)
    return ServingChoice(plan, tuple(devices), predict_serving(spec, plan, cluster, devices, facts))


def _too_large(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, devices: Sequence[int]) -> CapacityError:
    """What one device would have to hold, and what all have."""
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
