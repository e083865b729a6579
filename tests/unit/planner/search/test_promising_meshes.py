"""The search on many devices, made to search small clusters, against what is best there; and on many devices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.planner.many_machines import cluster_of as machines_of
from benchmarks.planner.many_machines import model
from tests.unit.planner.search.test_serving_search import cluster_of, some_of, spec_of
from tllm.core.errors import CapacityError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.search import promising_meshes, training_layouts, training_search
from tllm.planner.search.training_constraints import MICROBATCHES, TrainingConstraints
from tllm.planner.search.training_search import best_training
from tllm.spec.model_spec import ModelSpec


@pytest.fixture
def as_many(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Searches as if every cluster had many devices."""

    def search(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> float:
        with monkeypatch.context() as patch:
            for module in (training_layouts, training_search):
                patch.setattr(module, "MOST_DEVICES", 0)
            found = best_training(spec, cluster, facts)
        assert not found.exact
        best = found.choices[0]
        assert best.placed.fits(best.placed.memory())
        return best.predicted.seconds

    return search


@pytest.mark.parametrize("seed", some_of(12, 3))
def test_small_clusters_are_planned_nearly_as_well(seed: int, as_many: Any) -> None:
    draw = random.Random(3000 + seed)
    spec, cluster = spec_of(3), cluster_of(draw, draw.choice([2, 2, 3]), 2)
    facts = TrainingFacts(64, 6)
    try:
        best = best_training(spec, cluster, facts).choices[0].predicted.seconds
    except CapacityError:
        with pytest.raises(CapacityError):
            as_many(spec, cluster, facts)
        return
    seconds = as_many(spec, cluster, facts)
    assert seconds <= 1.25 * best


def test_meshes_are_of_different_devices_of_the_cluster_and_rank_0_is_where_it_must() -> None:
    spec, cluster, facts = model(), machines_of(40), TrainingFacts(1024, 640, dtype="bfloat16")
    last = 39
    meshes = promising_meshes.promising_meshes(spec, cluster, facts, TrainingConstraints(first_device=last))
    for sized in meshes:
        devices = sized.mesh.devices
        assert devices[0] == last and len(set(devices)) == len(devices) and set(devices) <= set(range(40))
        assert len(devices) == sized.mesh.axes.dp * sized.mesh.axes.pp * sized.mesh.axes.cp * sized.mesh.axes.tp
        assert sized.sizes and set(sized.sizes) <= set(MICROBATCHES)
    assert len({sized.mesh.axes for sized in meshes}) > 4
