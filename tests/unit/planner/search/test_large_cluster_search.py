"""The plan for many devices against all that are looked at, played one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.selection import covering, soak_but
from tests.unit.planner.simulate.test_large_cluster import EXPERTS, TEXT, cluster_of
from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.cluster_file import parse_cluster
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.search import large_cluster_search as wide
from tllm.spec.trainable import check_trainable


def small(memory: str) -> Cluster:
    return parse_cluster(TEXT.format(count=8, devices=4).replace('"80 GB"', f'"{memory}"'), Path("big.toml"))


SPECS = {"dense": SPEC, "experts": EXPERTS}


@pytest.mark.parametrize(("memory", "name"), covering(["321 MB", "80 GB", "318 MB"], reversed(SPECS)))
def test_none_of_those_that_fit_is_faster(memory: str, name: str) -> None:
    spec = SPECS[name]
    cluster, facts = small(memory), TrainingFacts(64, 64)
    best = wide.best_even_plan(spec, cluster, facts, played=1000)
    seconds = []
    for _, plan in wide._plans(spec, cluster, facts):
        for placed in wide._that_fit(spec, plan, facts, cluster, None)[0]:
            check_trainable(placed.plan, spec, [facts.microbatches // plan.replicas] * plan.replicas)
            seconds.append(placed.predict().seconds)
            assert placed.fits(placed.memory())
    assert best.predict().seconds == min(seconds)
    assert best.plan.world_size == 32


EACH_FEW = (304, 306, 309, 310, 312, 315, 318, 321, 330, 80_000)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("dense", EACH_FEW[::3]), ("experts", EACH_FEW[2::3]), *soak_but([], [(name, EACH_FEW) for name in SPECS])],
)
def test_more_memory_makes_no_plan_slower(name: str, sizes: tuple[int, ...]) -> None:
    seconds = []
    for megabytes in sizes:
        try:
            best = wide.best_even_plan(SPECS[name], small(f"{megabytes} MB"), TrainingFacts(64, 64), played=1000)
        except CapacityError:
            assert not seconds, "what fits in less fits in more"
            continue
        seconds.append(best.predict().seconds)
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) > 1


def test_the_less_memory_the_slower_a_plan_is_left() -> None:
    """Layers run again, then tensors are cut. For stages, what they load is more than this model."""
    sizes = "80 GB", "318 MB", "315.5 MB", "314.4 MB"
    found = [wide.best_even_plan(SPEC, small(memory), TrainingFacts(64, 64)) for memory in sizes]
    seconds = [one.predict().seconds for one in found]
    assert seconds == sorted(set(seconds))
    plans = [one.plan for one in found]
    assert [(plan.recompute, plan.pp, plan.stages[0].tp) for plan in plans] == [
        ("none", 1, 1),
        ("layer", 1, 1),
        ("layer", 1, 2),
        ("layer", 1, 4),
    ]


def test_what_fits_nowhere_says_how_much_is_missing() -> None:
    with pytest.raises(CapacityError, match=r"needs least takes 0\.\d+ GiB on a rank, and a device has 0\.27 GiB"):
        wide.best_even_plan(SPEC, small("288.4 MB"), TrainingFacts(64, 64))


def test_too_few_rows() -> None:
    with pytest.raises(PlanError, match="1 microbatch is too few for 2048 devices"):
        wide.best_even_plan(replace(SPEC, layers=SPEC.layers[:1]), cluster_of(256, 8), TrainingFacts(8, 1))


@pytest.mark.parametrize("machines", soak_but([512], [512, 2048]))
def test_thousands_of_devices_in_some_seconds(machines: int) -> None:
    best = wide.best_even_plan(SPEC, cluster_of(machines, 8), TrainingFacts(64, 8 * machines), played=4)
    assert best.plan.world_size == 8 * machines
